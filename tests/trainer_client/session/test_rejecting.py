"""Steps given back in part, by a session on a real service."""

import threading

import pytest

from buffer_wire.errors import InvalidField
from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess
from tests.trainer_client.test_service import ids, tasks
from trainer_client import BufferClient, Policy, SessionOptions, TrainerSession
from trainer_client.batch import Batch, Group

QUICK = SessionOptions(pull_timeout_s=30)
WHOLE = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block", max_lookahead=1)
STREAMED = Policy(batch_groups=4, micro_batch_groups=2, max_queued_groups=6, overflow_action="block")
BAD = {"t1", "t4", "t6"}


def bad(batch: Batch) -> list[Group]:
    return [group for group in batch.groups if group.task_id in BAD]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_whole_batch_is_whole_again(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    trained = []
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block", max_lookahead=1, max_staleness=2)
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(19), prefetch=prefetch, options=QUICK) as session,
    ):
        for batch in session:
            while groups := bad(batch):
                batch = session.reject(batch, groups, "as the test says")  # noqa: PLW2901 - as trainers do
            assert (len(batch.groups), batch.info.total_groups, batch.final) == (4, 4, True)
            assert batch.info.total_tokens == sum(sample.tokens for sample in batch.samples)
            assert batch.info.shard_groups == 4
            trained += ids(batch)
            assert session.metrics()["rollout_buffer/shard_groups"] == 4
            session.publish()
        run = session.state()
    assert sorted(trained) == sorted({f"t{i}" for i in range(19)} - BAD)
    assert (run.ledger.groups.rejected.groups, run.ledger.groups.trained.groups, run.ledger.balanced) == (3, 16, True)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_micro_batches_go_on_until_the_step_has_its_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    steps: dict[int, list[str]] = {}
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=STREAMED, tasks=tasks(15), prefetch=prefetch, options=QUICK) as session,
    ):
        for micro in session.micro_batches():
            if groups := bad(micro):
                micro = session.reject(micro, groups, "as the test says")  # noqa: PLW2901 - as trainers do
            steps.setdefault(micro.step, []).extend(ids(micro))
            if micro.final:
                assert micro.info.total_groups == len(steps[micro.step]) == 4
                session.publish()
                assert session.next_step == micro.step + 1
        run = session.state()
    assert sorted(name for names in steps.values() for name in names) == sorted({f"t{i}" for i in range(15)} - BAD)
    assert (run.committed_steps, run.ledger.groups.rejected.groups, run.ledger.balanced) == (3, 3, True)


def test_a_trainer_that_dies_in_between_gets_the_same_step(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(12), options=QUICK) as first,
    ):
        batch = next(first)
        client.reject(run_id, term=first.term, step=0, group_ids=[batch.groups[0].group_id], reason="then it dies")
    kept = ids(batch)[1:]
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, tasks=tasks(12), options=QUICK) as second,
    ):
        again = next(second)
        assert (ids(again)[:3], len(again.groups), again.final) == (kept, 4, True)
    with client.session(run_id, options=QUICK) as third:
        assert ids(next(third)) == ids(again)


def test_when_no_others_come_the_batch_stays_smaller(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(4), options=QUICK) as session,
    ):
        batch = next(session)
        smaller = session.reject(batch, batch.groups[:1], "no use")
        assert (len(smaller.groups), smaller.final, smaller.info.total_groups) == (3, False, 3)
        session.publish()
        run = session.state()
        assert (run.ledger.groups.trained.groups, run.missing_groups) == (3, 0)


def test_ranks_give_back_together(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    barrier = threading.Barrier(2, timeout=30)
    made: dict[int, list[str]] = {}
    policy = Policy(batch_groups=4, equal_shards=True, max_queued_groups=8, overflow_action="block")

    def rank(number: int, session: TrainerSession) -> None:
        batch = next(session)
        whole = session.reject(batch, batch.groups[:number], "of rank 1 alone", barrier=barrier.wait)
        assert (whole.info.total_groups, whole.final) == (4, True)
        made[number] = ids(whole)

    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(8), world_size=2, options=QUICK) as leader,
        BufferClient(service.address) as other,
        other.session(run_id, rank=1, world_size=2, start=leader.start, options=QUICK) as follower,
    ):
        with pytest.raises(InvalidField, match="barrier"):
            leader.reject(None, [], "alone")  # type: ignore[arg-type]
        threads = [threading.Thread(target=rank, args=(i, each)) for i, each in enumerate((leader, follower))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(made[number]) for number in (0, 1)] == [2, 2]
    assert len({*made[0], *made[1]}) == 4


def test_others_cannot_be_left_out_of_steps_that_come_in_parts(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=STREAMED, tasks=tasks(8), options=QUICK) as session,
    ):
        micro = next(session.micro_batches())
        with pytest.raises(InvalidField, match="others"):
            session.reject(micro, micro.groups[:1], "no use", others=False)
        assert session.state().ledger.groups.rejected.groups == 0


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("group_ids", {"group_ids": ["t/0"] * 4_097}),
        ("group_ids[0]", {"group_ids": ["never/0"]}),
        ("group_ids[1]", {"group_ids": ["t0/0", ""]}),
        ("reason", {"reason": "two\nlines"}),
        ("reason", {"reason": "x" * 201}),
        ("term", {"term": 0}),
    ],
)
def test_what_is_wrong_with_a_rejection_is_named(
    service: ServiceProcess, client: BufferClient, run_id: str, field: str, given: dict[str, object]
) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(4), options=QUICK) as session,
    ):
        next(session)
        asked = {"term": session.term, "step": 0, "group_ids": ["t0/0"], "reason": ""} | given
        with pytest.raises(InvalidField) as refused:
            client.reject(run_id, **asked)  # type: ignore[arg-type]
        assert refused.value.attributes["field"] == field
        assert session.state().ledger.groups.rejected.groups == 0
