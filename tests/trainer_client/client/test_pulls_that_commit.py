"""Pulls that commit and checkpoint, at a service that does so and at an older one, which does not know how."""

from collections.abc import Sequence

import pytest

from buffer_wire.errors import BatchNotReady, NotCommitted
from rollout_buffer.v1 import batches_pb2
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import Do, FakeService, pull_messages

pytestmark = pytest.mark.matrix

PULL = {"term": 2, "step": 4, "commit_through": 3, "checkpoint_through": 2}
COMMIT, CHECKPOINT = "BatchService/Commit", "BatchService/Checkpoint"


def of_this_version(messages: Sequence[bytes], committed: int = 4, checkpointed: int = 3) -> list[bytes]:
    """The messages of a service that has committed and checkpointed."""
    first = batches_pb2.PullBatchResponse.FromString(messages[0])
    first.batch.committed_steps, first.batch.checkpointed_steps = committed, checkpointed
    return [first.SerializeToString(), *messages[1:]]


def with_calls(fake: FakeService) -> FakeService:
    fake.answer(COMMIT, batches_pb2.CommitResponse(revision=2, committed_steps=4))
    fake.answer(CHECKPOINT, batches_pb2.CheckpointResponse(revision=3, checkpointed_steps=3))
    return fake


def said_apart(fake: FakeService) -> list[tuple[int, int]]:
    """Terms and steps of separate commits and checkpoints."""
    return [(call.term, call.through_step) for call in (*fake.requests[COMMIT], *fake.requests[CHECKPOINT])]


def test_one_call_commits_checkpoints_and_pulls(fake: FakeService, do: Do) -> None:
    messages = pull_messages([arrays_for("a"), arrays_for("b"), arrays_for("c")], step=4)
    fake.answer("BatchService/PullBatch", messages[:2], of_this_version(messages))
    batch = do("pull", "r", **PULL)
    assert (batch.info.committed_steps, batch.info.checkpointed_steps) == (4, 3)
    requests = fake.requests["BatchService/PullBatch"]
    # The stream that was cut is repeated as it was.
    assert [(one.commit_through_step, one.checkpoint_through_step) for one in requests] == [(3, 2)] * 2


def test_a_pull_that_says_nothing_commits_nothing(fake: FakeService, do: Do) -> None:
    fake.answer("BatchService/PullBatch", pull_messages([arrays_for("a")]))
    do("pull", "r", term=1, step=0)
    (request,) = fake.requests["BatchService/PullBatch"]
    assert not request.HasField("commit_through_step")
    assert not request.HasField("checkpoint_through_step")


def test_only_the_first_micro_batch_of_a_step_commits(fake: FakeService, do: Do) -> None:
    parts = [pull_messages([arrays_for("a")], step=4, micro_batch=i, final=i == 1) for i in range(2)]
    fake.answer("BatchService/PullBatch", of_this_version(parts[0]), parts[1])
    assert do("pull", "r", **PULL).info.committed_steps == 4
    first, second = fake.requests["BatchService/PullBatch"]
    assert (first.commit_through_step, second.micro_batch) == (3, 1)
    assert not second.HasField("commit_through_step")


def test_an_older_service_is_asked_by_separate_calls(fake: FakeService, do: Do) -> None:
    with_calls(fake).answer("BatchService/PullBatch", pull_messages([arrays_for("a")], step=4))
    do("pull", "r", **PULL)
    assert said_apart(fake) == [(2, 3), (2, 2)]


def test_step_0_is_not_taken_for_committed(fake: FakeService, do: Do) -> None:
    with_calls(fake).answer("BatchService/PullBatch", pull_messages([arrays_for("a")], step=1))
    do("pull", "r", term=2, step=1, commit_through=0)
    assert said_apart(fake) == [(2, 0)]


def test_an_older_service_whose_batch_waits_for_the_commit_gets_it(fake: FakeService, do: Do) -> None:
    short = BatchNotReady(step=4, queued_groups=0, needed_groups=1, leased=0, pending=0, waits_on="room")

    def once_committed(_request: object, _context: object) -> list[bytes] | BatchNotReady:
        done = fake.requests[COMMIT] and fake.requests[CHECKPOINT]
        return pull_messages([arrays_for("a")], step=4) if done else short

    with_calls(fake).answer("BatchService/PullBatch", once_committed)
    assert do("pull", "r", **PULL).info.step == 4


def test_what_an_older_service_refuses_is_raised(fake: FakeService, do: Do) -> None:
    with_calls(fake).answer("BatchService/PullBatch", pull_messages([arrays_for("a")], step=4))
    fake.answer(CHECKPOINT, NotCommitted(2, 1))
    with pytest.raises(NotCommitted):
        do("pull", "r", **PULL)
