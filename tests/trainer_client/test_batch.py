"""Batches as arrays: right values, right shapes, and not one copy."""

import time

import numpy as np
import pytest

from buffer_wire.codec import Delivered, join_group, join_pull
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions
from buffer_wire.status import ServiceUnreachable
from rollout_buffer.v1 import groups_pb2
from tests.support.push import Extra, GroupArrays, SampleArrays, arrays_for
from tests.trainer_client.fake_service import pull_messages
from trainer_client.batch import Batch
from trainer_client.client.assembly import PullAssembly

pytestmark = pytest.mark.matrix


def assemble(messages: list[bytes], revisions: Revisions | None = None) -> Batch:
    assembly = PullAssembly("r", revisions or Revisions(), time.monotonic())
    for message in messages:
        assembly.add(message)
    return assembly.finish()


def test_arrays_come_out_as_they_were_pushed() -> None:
    groups = [arrays_for(f"t{i}", group_size=3) for i in range(5)]
    batch = assemble(pull_messages(groups))
    assert [group.task_id for group in batch.groups] == [f"t{i}" for i in range(5)]
    pushed = [sample for group in groups for sample in group.samples]
    pulled = list(batch.samples)
    assert len(pulled) == 15
    for sample, was in zip(pulled, pushed, strict=True):
        assert sample.token_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert sample.loss_mask.dtype == np.uint8
        np.testing.assert_array_equal(sample.token_ids, was.token_ids)
        np.testing.assert_array_equal(sample.logprobs, was.logprobs)
        np.testing.assert_array_equal(sample.loss_mask, was.loss_mask)
        assert (sample.prompt_len, sample.reward, sample.tokens) == (3, was.reward, len(was.token_ids))
        assert sample.loss_tokens == was.loss_mask.sum()
        assert sample.finish_reason == "stop"


def test_arrays_lie_in_the_received_messages_and_are_read_only() -> None:
    messages = pull_messages([arrays_for("a"), arrays_for("b"), arrays_for("c")])
    received = [np.frombuffer(message, np.uint8) for message in messages]
    samples = assemble(messages).samples
    arrays = [a for s in samples for a in (s.token_ids, s.logprobs, s.loss_mask)]
    assert len(arrays) == 18
    for array in arrays:
        assert any(np.shares_memory(array, message) for message in received)
        assert not array.flags.writeable


def test_extra_columns_are_sliced_by_their_axis() -> None:
    plain = arrays_for("a", group_size=2)
    lengths = [len(sample.token_ids) for sample in plain.samples]
    experts = [np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3) for n in lengths]
    scores = [np.array([1.5, 2.5]), np.array([3.5, 4.5])]
    images = [np.ones((4, 2), np.float16), np.zeros((0, 2), np.float16)]
    group = GroupArrays(
        task_id="a",
        samples=plain.samples,
        extras={
            "experts": Extra(axis=groups_pb2.AXIS_TOKEN, arrays=experts),
            "scores": Extra(axis=groups_pb2.AXIS_SAMPLE, arrays=scores),
            "images": Extra(axis=groups_pb2.AXIS_RAGGED, arrays=images),
        },
    )
    messages = pull_messages([group])
    (pulled,) = assemble(messages).groups
    for i, sample in enumerate(pulled.samples):
        assert set(sample.extras) == {"experts", "scores", "images"}
        np.testing.assert_array_equal(sample.extras["experts"], experts[i])
        np.testing.assert_array_equal(sample.extras["scores"], scores[i])
        np.testing.assert_array_equal(sample.extras["images"], images[i])
        assert sample.extras["images"].shape == images[i].shape
        assert np.shares_memory(sample.extras["experts"], np.frombuffer(messages[1], np.uint8))


def one_sample(spans: list[tuple[int, int, int, int]], tokens: int = 8) -> GroupArrays:
    sample = SampleArrays(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        loss_mask=np.zeros(tokens, np.uint8),
        prompt_len=2,
        spans=spans,
        turns=[("user", 0, 2), ("assistant", 2, tokens)],
        finish_reason=groups_pb2.FINISH_REASON_LENGTH,
    )
    return GroupArrays(
        task_id="t", incarnation=3, samples=[sample], environment="sums", metadata={"answer": 7, "why": ["ä"]}
    )


def test_versions_are_given_for_each_token() -> None:
    messages = pull_messages(
        [one_sample([(1, 4, 2, 5), (1, 6, 5, 8)])], train_version=9, head_version=4, tail_version=6
    )
    (group,) = assemble(messages).groups
    (sample,) = group.samples
    assert sample.versions.dtype == np.int64
    assert sample.versions.tolist() == [-1, -1, 4, 4, 4, 6, 6, 6]
    assert not sample.versions.flags.writeable
    assert [(span.version.version, span.start, span.end) for span in sample.spans] == [(4, 2, 5), (6, 5, 8)]
    assert (group.head_version, group.tail_version, group.train_version, group.staleness) == (4, 6, 9, 5)


@pytest.mark.parametrize(
    ("spans", "tail", "versions"),
    [
        ([(1, 9, 2, 8)], 5, [5, 5, 5, 5, 5, 5]),
        ([(1, 9, 2, 5), (2, 6, 5, 8)], 6, [6, 6, 6, 6, 6, 6]),
        ([(1, 3, 2, 4), (1, 9, 4, 6), (2, 6, 6, 8)], 6, [3, 3, 6, 6, 6, 6]),
    ],
)
def test_versions_of_an_abandoned_timeline_never_look_newer_than_the_group(
    spans: list[tuple[int, int, int, int]], tail: int, versions: list[int]
) -> None:
    (group,) = assemble(pull_messages([one_sample(spans)], tail_version=tail)).groups
    assert group.samples[0].versions[2:].tolist() == versions


def test_a_group_says_where_it_comes_from() -> None:
    (group,) = assemble(pull_messages([one_sample([(1, 0, 2, 8)])])).groups
    assert (group.task_id, group.incarnation, group.environment, group.worker_id) == ("t", 3, "sums", "tester")
    assert group.metadata == {"answer": 7, "why": ["ä"]}
    assert group.rewards.tolist() == [0.0]
    assert group.samples[0].finish_reason == "length"
    assert [(turn.role, turn.start, turn.end) for turn in group.samples[0].turns] == [
        ("user", 0, 2),
        ("assistant", 2, 8),
    ]


def test_a_group_without_metadata_has_an_empty_mapping() -> None:
    (group,) = assemble(pull_messages([arrays_for("a")])).groups
    assert group.metadata == {}


def test_facts_of_the_step_are_carried() -> None:
    groups = [arrays_for("a"), arrays_for("b")]
    messages = pull_messages(groups, step=4, train_version=7)
    info = assemble(messages).info
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    assert (info.step, info.train_version, info.total_groups, info.total_samples) == (4, 7, 2, 4)
    assert (info.total_tokens, info.total_loss_tokens) == (tokens, tokens - 3 * 4)
    assert (info.staleness_mean, info.staleness_max) == (1.5, 2)
    assert assemble(messages).received_bytes == sum(len(message) for message in messages)


def test_the_highest_revision_of_the_stream_is_noted() -> None:
    revisions = Revisions()
    assemble(pull_messages([arrays_for("a")], revision=41), revisions)
    assert revisions.seen("r") == 41


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stream_that_ends_early_can_be_repeated(lost: int) -> None:
    messages = pull_messages([arrays_for("a"), arrays_for("b"), arrays_for("c")])
    del messages[-1 if lost else 0]
    with pytest.raises(ServiceUnreachable, match="ended early") as raised:
        assemble(messages)
    assert raised.value.retryable


def test_a_payload_that_is_not_what_its_header_says_is_refused() -> None:
    header, payload = arrays_for("a").to_wire()
    messages = pull_messages([arrays_for("a")])
    body = b"".join(join_group(header, payload + b"\0"))
    messages[1] = join_pull(Revision(1), [Delivered(body, 1, 0, 0)])
    (group,) = assemble(messages).groups
    with pytest.raises(ValueError, match="describes"):
        len(group.samples)


def test_an_empty_shard_is_a_batch_without_groups() -> None:
    batch = assemble(pull_messages([]))
    assert list(batch.samples) == []
    assert batch.info.shard_groups == 0
