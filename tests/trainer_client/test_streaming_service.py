"""Micro-batches from a real service: as they come, on several ranks, joined, ahead of their turn, after a resume."""

import itertools
import threading
from collections.abc import Iterator

import pytest

from buffer_wire.errors import BatchNotReady, InvalidField
from tests.support.push import Pusher, PushingWorker, arrays_for
from tests.support.service import ServiceProcess
from tests.trainer_client.test_service import contents, ids, tasks
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task, TrainerSession
from trainer_client.batch import Batch

QUICK = SessionOptions(pull_timeout_s=30)
STREAMED = Policy(batch_groups=6, micro_batch_groups=2, max_queued_groups=6, overflow_action="block")


def endless() -> Iterator[Task]:
    for i in itertools.count():
        yield Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2])


def loss_tokens(*batches: Batch) -> int:
    return sum(sample.loss_tokens for batch in batches for sample in batch.samples)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_micro_batches_come_before_the_step_is_there_and_add_up_to_it(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    seen: list[Batch] = []
    with (
        client.session(run_id, policy=STREAMED, tasks=tasks(24), prefetch=prefetch, options=QUICK) as session,
        PushingWorker(service.address, run_id),
    ):
        for micro in session.micro_batches():
            seen.append(micro)
            of_step = [batch for batch in seen if batch.step == micro.step]
            assert micro.info.total_loss_tokens == loss_tokens(*of_step)
            assert micro.info.total_groups == 2 * (micro.micro_batch + 1)
            assert micro.info.train_version == micro.step
            if micro.final:
                session.publish()
        run = session.state()
    assert [(b.step, b.micro_batch, b.final) for b in seen] == [(s, r, r == 2) for s in range(4) for r in range(3)]
    assert sorted(ids_of(seen)) == sorted(f"t{i}" for i in range(24))
    assert (run.committed_steps, run.published.version, run.ledger.groups.trained.groups) == (4, 4, 24)
    assert run.ledger.balanced


def ids_of(batches: list[Batch]) -> list[str]:
    return [name for batch in batches for name in ids(batch)]


def test_a_micro_batch_is_there_as_soon_as_its_groups_are(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with client.session(run_id, policy=STREAMED, options=QUICK) as session, Pusher(service.address, run_id) as pusher:
        micro_batches = session.micro_batches()
        pusher.push(*[arrays_for(f"t{i}") for i in range(3)])
        first = next(micro_batches)
        assert (ids(first), first.final, session.next_step) == (["t0", "t1"], False, 0)
        run = session.state()
        assert (run.ledger.groups.queued.groups, run.ledger.groups.forming.groups, run.next_step) == (1, 2, 0)
        # Two of the step are still to come, and one of the next micro-batch.
        with pytest.raises(BatchNotReady):
            client.pull(run_id, term=session.term, step=0, micro_batch=1, timeout_s=0.2)
        pusher.push(*[arrays_for(f"t{i}") for i in range(3, 6)])
        assert [ids(next(micro_batches)) for _ in range(2)] == [["t2", "t3"], ["t4", "t5"]]
        assert session.next_step == 1
        assert session.state().ledger.groups.delivered.groups == 6
        with pytest.raises(InvalidField):
            client.pull(run_id, term=session.term, step=0, micro_batch=3, timeout_s=1)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_whole_batches_are_gathered_from_the_micro_batches(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    seen: list[str] = []
    with (
        client.session(run_id, policy=STREAMED, tasks=tasks(18), prefetch=prefetch, options=QUICK) as session,
        PushingWorker(service.address, run_id),
    ):
        for batch in session:
            assert (len(batch.groups), batch.final, batch.info.total_groups) == (6, True, 6)
            assert batch.info.total_loss_tokens == loss_tokens(batch)
            seen += ids(batch)
            session.publish()
        assert session.state().committed_steps == 3
    assert sorted(seen) == sorted(f"t{i}" for i in range(18))


def test_two_ranks_accumulate_over_the_same_micro_batches(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=8, micro_batch_groups=2, max_queued_groups=8, overflow_action="block")
    taken: dict[int, list[Batch]] = {0: [], 1: []}
    failures: list[BaseException] = []
    published = threading.Barrier(2)

    def train(rank: int, session: TrainerSession) -> None:
        try:
            for micro in session.micro_batches():
                taken[rank].append(micro)
                if micro.final:
                    session.publish()
                    published.wait(20)
                if micro.final and micro.step == 3:
                    break
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            failures.append(error)
            published.abort()

    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=endless(), world_size=2, options=QUICK) as first,
        client.session(run_id, rank=1, world_size=2, start=first.start, options=QUICK) as second,
    ):
        threads = [threading.Thread(target=train, args=pair) for pair in ((0, first), (1, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if failures:
            raise failures[0]
    places = [
        [(b.step, b.micro_batch, b.final, b.info.train_version) for b in micro_batches]
        for micro_batches in taken.values()
    ]
    assert places[0] == places[1] == [(s, r, r == 1, s) for s in range(4) for r in range(2)]
    for one, two in zip(taken[0], taken[1], strict=True):
        assert one.info.total_loss_tokens == two.info.total_loss_tokens
        assert one.info.shard_groups + two.info.shard_groups == 4
    for step in range(4):
        final = [b for b in taken[0] if b.step == step][-1]
        both = [b for micro_batches in taken.values() for b in micro_batches if b.step == step]
        assert final.info.total_loss_tokens == loss_tokens(*both)
    everything = ids_of(taken[0] + taken[1])
    assert len(set(everything)) == len(everything) == 32


def test_a_resume_within_a_step_replays_its_micro_batches_and_goes_on(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with PushingWorker(service.address, run_id):
        with client.session(run_id, policy=STREAMED, tasks=endless(), options=QUICK) as session:
            before = list(itertools.islice(session.micro_batches(), 5))
            session.publish()
        assert client.run(run_id).committed_steps == 1
        with client.session(run_id, tasks=endless(), options=QUICK) as session:
            assert (session.start.next_step, session.start.next_unassembled_step) == (1, 1)
            after = list(itertools.islice(session.micro_batches(), 3))
    assert [(b.step, b.micro_batch, b.info.replayed) for b in after] == [(1, 0, True), (1, 1, True), (1, 2, False)]
    assert [contents(b) for b in after[:2]] == [contents(b) for b in before[3:]]
    assert {b.info.train_version for b in after} == {before[3].info.train_version}
    assert after[-1].info.total_loss_tokens == loss_tokens(*after)


def test_n_follows_the_trainer_from_step_to_step(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(
            run_id,
            policy=Policy(batch_groups=4, max_queued_groups=8, overflow_action="block"),
            tasks=endless(),
            prefetch=2,
            batch_groups=lambda step: 2 + 2 * step,
            options=QUICK,
        ) as session,
    ):
        assert [len(next(session).groups) for _ in range(4)] == [2, 4, 6, 8]


def test_a_run_that_begins_to_stream_does_so_with_its_next_step(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=4, overflow_action="block")
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=endless(), options=QUICK) as session,
    ):
        micro_batches = session.micro_batches()
        assert next(micro_batches).final
        assert session.update_policy(micro_batch_groups=1).micro_batch_groups == 1
        assert [next(micro_batches).final for _ in range(4)] == [False, False, False, True]
        session.update_policy(micro_batch_groups=0)
        assert next(micro_batches).final
