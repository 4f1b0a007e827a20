"""Miles' data buffer on a real service; groups are what Miles' own engines would have finished."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from buffer_wire.errors import BatchNotReady, InvalidField
from examples.miles.stand_in import arguments
from tests.integrations.miles_contract import installed, types_of
from tests.support.service import ServiceProcess
from trainer_client import BufferClient
from trainer_client.integrations.miles import BufferServiceDataBuffer
from trainer_client.integrations.miles.data_buffer import Stopped
from trainer_client.integrations.miles.finished import Versions

PREFIX = "rollout/fully_async"
MILES = types_of("miles")
Sample, DataBufferInput = MILES.Sample, MILES.DataBufferInput


@pytest.fixture(autouse=True)
def contract() -> Iterator[None]:
    with installed("miles"):
        yield


@pytest.fixture
def args(service: ServiceProcess, request: pytest.FixtureRequest) -> Any:
    """Args of a job of two groups a rollout; capacity 4 groups."""
    return arguments(
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_buffer_address=service.address,
        rollout_buffer_run=request.node.name[:60].replace("[", "-").replace("]", ""),
        rollout_buffer_timeout_s=30,
    )


class Buffer(BufferServiceDataBuffer):
    """Buffer with the prompts that its handler was given."""

    def __init__(self, args: Any) -> None:
        self.unused: list[list[Any]] = []
        super().__init__(MILES.DataBufferConstructorInput(args, self.unused.append))


@pytest.fixture
def buffer(args: Any) -> Iterator[Any]:
    made: Any = Buffer(args)
    yield made
    asyncio.run(made.aclose())


def finished(index: int, *versions: str, status: Any = Sample.Status.COMPLETED, **more: Any) -> Any:
    """Prompt group `index` and what was made of it; by default at Miles' version 1."""
    prompts, group = [], []
    for j in range(2):
        prompt = Sample(group_index=index, index=2 * index + j, prompt=f"prompt {index}", label=str(index))
        length = 4 + j
        prompts.append(prompt)
        group.append(
            Sample(
                group_index=index, index=prompt.index, prompt=prompt.prompt, label=prompt.label,
                tokens=[1, 2, 3, *range(10, 10 + length)], response="ok" * length, response_length=length,
                reward=float(j), loss_mask=[1] * (length - 1) + [0], rollout_log_probs=[-0.5] * (length - 1) + [0.0],
                weight_versions=list(versions or ("1",)), status=status, metadata={"row": index},
            )
        )  # fmt: skip
        vars(group[-1]).update(more)
    return DataBufferInput(prompts, group)


def assert_same(entry: Any, put: Any) -> None:
    assert isinstance(entry, DataBufferInput)
    assert [sample.to_dict() for sample in entry.prompt_group] == [sample.to_dict() for sample in put.prompt_group]
    assert [sample.to_dict() for sample in entry.group] == [sample.to_dict() for sample in put.group]


async def test_groups_come_out_as_they_went_in(buffer: Any, client: BufferClient, args: Any) -> None:
    put = [finished(i) for i in range(3)]
    put[1].group[0].status = Sample.Status.TRUNCATED
    put[1].group[1].loss_mask = put[1].group[1].rollout_log_probs = None
    put[1].group[1].remove_sample = True
    put[2].group[0].reward = {"score": 0.25, "format": 1.0}
    put[2].group[1].teacher_log_probs = [-0.1, -0.2, -0.3, -0.4, -0.5]
    for group in put:
        await buffer.put(group)
    for group in put:
        assert_same(await buffer.get(current_version=1, some_future_key=2), group)
    run = client.run(args.rollout_buffer_run)
    assert run.next_step == 3
    assert run.ledger.balanced


async def test_groups_that_are_used_again_are_refused_by_name(buffer: Any, client: BufferClient, args: Any) -> None:
    """Whoever has an operator change the policy that far is told, and trains on nothing twice."""
    for i in range(4):
        await buffer.put(finished(i))
    await buffer.get(current_version=1)
    client.update_policy(args.rollout_buffer_run, max_uses=2, reuse_share_milli=1_000, reuse_max_staleness=9)
    # The first group is trained, and committed, by version 4.
    for version in (2, 3):
        await buffer.get(current_version=version)
    with pytest.raises(InvalidField, match=r"policy\.max_uses.*trained on before"):
        await buffer.get(current_version=4)


async def test_arrays_and_nested_groups_travel(buffer: Any) -> None:
    put = finished(7, rollout_routed_experts=None)
    experts = np.arange(6 * 2 * 3, dtype=np.int32).reshape(6, 2, 3)
    put.group[0].rollout_routed_experts = experts
    put.group = [[put.group[0], put.group[1]], put.group[1]]
    await buffer.put(put)
    entry = await buffer.get(current_version=1)
    (first, second), third = entry.group
    np.testing.assert_array_equal(first.rollout_routed_experts, experts)
    assert second.rollout_routed_experts is None
    assert second.to_dict() == third.to_dict() == put.group[1].to_dict()


async def test_what_miles_own_buffer_takes_is_handed_out_as_it_was(
    buffer: Any, client: BufferClient, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples without tokens or a response, numbers that JSON has no name for, numpy's, dataclasses, objects."""
    put = [finished(i) for i in range(4)]
    empty, prompt_only = put[0].group
    for sample in put[0].group:
        sample.status, sample.response, sample.response_length = Sample.Status.TRUNCATED, "", 0
        sample.loss_mask = sample.rollout_log_probs = None
    empty.tokens, empty.weight_versions = [], []
    prompt_only.tokens, prompt_only.loss_mask, prompt_only.rollout_log_probs = [1, 2, 3], [], []
    put[1].group[0].teacher_log_probs = [-0.1, float("-inf"), -0.3, -0.4]
    put[1].group[0].reward = float("-inf")
    put[1].group[1].metadata |= {"score": np.float32(0.5), "count": np.int64(3), "kept": np.arange(6).reshape(2, 3)}
    put[2].group[0].adapter = MILES.AdapterRef("math", 2)
    put[2].group[1].reward_spec = MILES.RewardSpec(rm_type="deepscaler")
    put[2].group[1].reward = np.float32(0.25)
    put[3].prompt_group[1].multimodal_inputs = {"images": [object()]}
    for group in put:
        await buffer.put(group)
    assert client.run(args.rollout_buffer_run).ledger.groups.queued.groups == 4
    entries = [await buffer.get(current_version=1) for _ in put]
    expected, got = put[1].group[1].metadata, entries[1].group[1].metadata
    np.testing.assert_array_equal(got.pop("kept"), expected.pop("kept"))
    for entry, group in zip(entries, put, strict=True):
        assert_same(entry, group)
    assert type(entries[2].group[0].adapter) is MILES.AdapterRef
    assert buffer.get_metrics()[f"{PREFIX}/fields_not_carried"] == 1
    said = [record.getMessage() for record in caplog.records if "cannot travel" in record.getMessage()]
    assert [line.split(" of samples")[0] for line in said] == ["the field multimodal_inputs"]

    # Another process has the bytes alone.
    successor: Any = Buffer(args)
    entries = [await successor.get(current_version=1) for _ in put]
    assert entries[3].prompt_group[1].multimodal_inputs is None
    put[3].prompt_group[1].multimodal_inputs = None
    assert_same(entries[3], put[3])
    assert_same(entries[0], put[0])
    await successor.aclose()


async def test_tensors_travel(buffer: Any) -> None:
    put = finished(1)
    pixels = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    put.group[0].multimodal_train_inputs = {"pixel_values": pixels}
    await buffer.put(put)
    entry = await buffer.get(current_version=1)
    assert torch.equal(entry.group[0].multimodal_train_inputs["pixel_values"], pixels)


async def test_policies_do_not_get_each_others_groups(buffer: Any, args: Any) -> None:
    await buffer.put(finished(0, trainer_model_id="actor"))
    with pytest.raises(InvalidField, match=r"trainer_model_id.*'actor'"):
        await buffer.put(finished(1, trainer_model_id="critic"))
    with pytest.raises(InvalidField, match=r"trainer_model_id.*'actor'"):
        await buffer.get(current_version=1, trainer_model_id="critic")
    with pytest.raises(InvalidField, match="trainer_model_id"):
        buffer.get_metrics(trainer_model_id="critic")
    # A second buffer, as the mapping of policies to classes makes one, is on the same run.
    second: Any = Buffer(args)
    with pytest.raises(InvalidField, match="trainer_model_id"):
        await second.put(finished(2, trainer_model_id="critic"))
    await second.aclose()
    entry = await buffer.get(current_version=1, trainer_model_id="actor")
    assert entry.group[0].trainer_model_id == "actor"


def test_buffer_of_receipts_is_refused_by_name(args: Any) -> None:
    given = SimpleNamespace(args=args, unused_handler_fn=print, discard_handler_fn=print)
    with pytest.raises(InvalidField, match="discard_handler_fn"):
        BufferServiceDataBuffer(given)


async def test_closed_buffer_ends_what_waits(args: Any) -> None:
    buffer: Any = Buffer(args)
    failed = asyncio.create_task(buffer.wait_failed())
    waiting = asyncio.create_task(buffer.get(current_version=1))
    while not buffer._waits:  # noqa: ASYNC110 - the get is on its way
        await asyncio.sleep(0)
    await buffer.aclose()
    with pytest.raises(Stopped):
        await asyncio.wait_for(waiting, 30)
    with pytest.raises(Stopped):
        await buffer.put(finished(0))
    await buffer.aclose()
    assert not failed.done()
    failed.cancel()


async def test_stale_groups_are_not_handed_out_and_their_prompts_are_given_back_once(
    args: Any, client: BufferClient
) -> None:
    args.max_weight_staleness = 2
    buffer = Buffer(args)
    put = [finished(0, "5"), finished(1, "5", "6"), finished(2, "6"), finished(3, "8")]
    for group in put[:3]:
        await buffer.put(group)
    assert_same(await buffer.get(current_version=7), put[0])
    await buffer.put(put[3])
    # At version 8, what began under 5 is three behind.
    assert_same(await buffer.get(current_version=8), put[2])
    assert buffer.unused == [put[1].prompt_group]
    metrics = buffer.get_metrics()
    assert metrics[f"{PREFIX}/stale_groups_filtered"] == 1
    assert metrics[f"{PREFIX}/queue_size"] == 1
    assert metrics[f"{PREFIX}/avg_staleness"] == 2.0
    assert metrics[f"{PREFIX}/buffer_max_staleness"] == 0
    # The prompts come again, under the same index.
    again = finished(1, "8")
    await buffer.put(again)
    assert_same(await buffer.get(current_version=8), put[3])
    assert_same(await buffer.get(current_version=8), again)
    assert len(buffer.unused) == 1
    assert buffer.get_metrics()[f"{PREFIX}/stale_groups_filtered"] == 0
    run = client.run(args.rollout_buffer_run)
    assert run.ledger.groups.dropped_stale.groups == 1
    # Miles' 5 is where the run began.
    assert run.published.version == 3
    await buffer.aclose()


async def test_aborted_and_filtered_groups_stay_outside(args: Any, client: BufferClient) -> None:
    args.dynamic_sampling_filter_path = f"{__name__}.keep_even"
    buffer = Buffer(args)
    aborted = finished(2, status=Sample.Status.ABORTED)
    await buffer.put(aborted)
    await buffer.put(finished(3))
    await buffer.put(finished(4))
    assert buffer.unused == [aborted.prompt_group]
    metrics = buffer.get_metrics()
    assert metrics[f"{PREFIX}/aborted_groups_filtered"] == 1
    assert metrics["rollout/dynamic_filter/drop_odd"] == 1
    assert client.run(args.rollout_buffer_run).ledger.groups.accepted.groups == 1
    assert "rollout/dynamic_filter/drop_odd" not in buffer.get_metrics()
    await buffer.aclose()


def keep_even(args: Any, group: list[Any]) -> Any:
    odd = (group[0].group_index or 0) % 2 == 1
    return MILES.DynamicFilterOutput(keep=not odd, reason="odd" if odd else None)


async def test_put_waits_for_room(buffer: Any, service: ServiceProcess) -> None:
    put = [finished(i) for i in range(5)]
    for group in put[:4]:
        await buffer.put(group)
    fifth = asyncio.create_task(buffer.put(put[4]))
    async with asyncio.timeout(10):
        while not service.metric("rollout_buffer_blocked_pushes"):
            assert not fifth.done()
            await asyncio.sleep(0.02)
    assert_same(await buffer.get(current_version=1), put[0])
    await asyncio.wait_for(fifth, 20)


async def test_queue_full_of_stale_groups_holds_nobody_up(args: Any) -> None:
    args.max_weight_staleness = 1
    buffer: Any = Buffer(args)
    put = [finished(i) for i in range(4)]
    for group in put:
        await buffer.put(group)
    fresh = finished(4, "3")
    fifth = asyncio.create_task(buffer.put(fresh))
    assert_same(await asyncio.wait_for(buffer.get(current_version=3), 30), fresh)
    await asyncio.wait_for(fifth, 20)
    assert buffer.unused == [group.prompt_group for group in put]
    await buffer.aclose()


async def test_get_waits_for_a_put_and_can_be_cancelled(buffer: Any) -> None:
    waiting = asyncio.create_task(buffer.get(current_version=1))
    # A put goes through while a get waits.
    first = finished(0)
    await asyncio.wait_for(buffer.put(first), 20)
    assert_same(await asyncio.wait_for(waiting, 20), first)
    waiting = asyncio.create_task(buffer.get(current_version=1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    second = finished(1)
    await buffer.put(second)
    assert_same(await asyncio.wait_for(buffer.get(current_version=1), 20), second)


async def test_wait_ends_with_what_is_short(args: Any) -> None:
    args.rollout_buffer_timeout_s = 0.5
    buffer = Buffer(args)
    with pytest.raises(BatchNotReady):
        await buffer.get(current_version=1)
    await buffer.aclose()


async def test_versions_are_published_and_trained_groups_committed(
    buffer: Any, client: BufferClient, args: Any
) -> None:
    """Order as in train_async.py: rollout r + 1 is asked for before r is trained, updates follow each training."""
    run_id, at = args.rollout_buffer_run, []
    for rollout_id, version in enumerate([1, 1, 2, 3]):
        for i in range(2):
            await buffer.put(finished(2 * rollout_id + i, str(version)))
        await both(buffer, version)
        run = client.run(run_id)
        at.append((run.published.version, run.committed_steps))
    assert at == [(0, 0), (0, 0), (1, 2), (2, 4)]


async def both(buffer: Any, version: int) -> list[Any]:
    """The groups of a rollout."""
    return [await buffer.get(current_version=version) for _ in range(2)]


async def test_group_made_by_newer_weights_than_any_get_has_named_is_taken(
    buffer: Any, client: BufferClient, args: Any
) -> None:
    """Miles updates its engines, which finish groups, before it asks for the next one."""
    await buffer.put(finished(0, "1"))
    await buffer.put(finished(1, "1", "2"))
    assert client.run(args.rollout_buffer_run).published.version == 1
    assert [entry.group[0].group_index for entry in await both(buffer, 2)] == [0, 1]


async def test_next_process_goes_on_at_the_start_rollout(buffer: Any, client: BufferClient, args: Any) -> None:
    put = [finished(i, "1" if i < 2 else "2") for i in range(5)]
    for group in put[:4]:
        await buffer.put(group)
    await both(buffer, 1)
    entry = await buffer.get(current_version=2)

    args.start_rollout_id = 1
    successor: Any = Buffer(args)
    # Miles counts its versions from 1 again.
    again = await both(successor, 1)
    assert [entry.group[0].index for entry in again] == [4, 6]
    assert entry.group[0].index == 4
    assert again[0].prompt_group[0].to_dict() == put[2].prompt_group[0].to_dict()
    assert again[0].group[0].tokens == put[2].group[0].tokens
    # The data source was put back as well: what is drawn again is known, what is new is not.
    await successor.put(finished(3))
    await successor.put(finished(4))
    assert (await successor.get(current_version=1)).group[0].group_index == 4
    run = client.run(args.rollout_buffer_run)
    assert (run.term, run.ledger.groups.queued.groups) == (3, 0)
    await successor.aclose()


@pytest.mark.parametrize(
    ("named", "spans"),
    [
        (["3"], [(13, 3, 8)]),
        (["3", "3"], [(13, 3, 8)]),
        (["5", "3", "4"], [(13, 3, 6), (14, 6, 7), (15, 7, 8)]),
        (["1", "2", "3", "4", "5", "6"], [(12, 3, 4), (13, 4, 5), (14, 5, 6), (15, 6, 7), (16, 7, 8)]),
        ([], [(20, 3, 8)]),
        (["default"], [(20, 3, 8)]),
    ],
)
def test_versions_of_tokens_are_never_taken_for_newer(named: Any, spans: Any) -> None:
    sample = Sample(tokens=[0] * 8, response_length=5, weight_versions=named)
    assert Versions(term=1, offset=10, published=20).spans(sample) == spans
