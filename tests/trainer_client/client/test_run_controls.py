"""Tests of what an operator does to a run on a real service, and how a trainer at work takes it."""

import asyncio
import threading
from dataclasses import replace

import pytest

from buffer_wire.errors import InvalidPolicy, RunPaused, UnknownRun
from tests.support.push import GroupArrays, Pusher, PushingWorker, arrays_for
from tests.support.service import ServiceProcess
from tests.trainer_client.test_service import ids, tasks
from tests.trainer_client.test_streaming_service import endless
from trainer_client import AsyncBufferClient, BufferClient, ClientOptions, Environment, Policy, SessionOptions, Waiting
from trainer_client.batch import Batch

QUICK = SessionOptions(pull_timeout_s=30)
BLOCKING = Policy(batch_groups=2, max_queued_groups=4, overflow_action="block")


def test_a_held_run_gives_no_batches_until_it_is_continued(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    waits: list[Waiting] = []

    def on_wait(waiting: Waiting) -> None:
        if "operator" in waiting.on:
            waits.append(waiting)
            if len(waits) == 3:
                client.continue_run(run_id)

    options = SessionOptions(pull_timeout_s=30, on_wait=on_wait)
    with client.session(run_id, policy=BLOCKING, options=options) as session:
        with Pusher(service.address, run_id) as pusher:
            pusher.push(*[arrays_for(f"t{i}") for i in range(4)])
        assert ids(next(session)) == ["t0", "t1"]
        client.pause_run(run_id)
        client.pause_run(run_id)
        assert session.state().paused == "operator"
        # What is assembled is still there for whoever asks again, and progress is made.
        assert ids(client.pull(run_id, term=session.term, step=0, timeout_s=5)) == ["t0", "t1"]
        session.publish()
        assert ids(next(session)) == ["t2", "t3"]
        assert len(waits) == 3
        assert session.state().paused == ""


def test_a_held_run_is_fed_on_when_it_is_continued(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, BLOCKING)
    client.pause_run(run_id)
    seen: list[str] = []
    with (
        client.session(run_id, tasks=tasks(6), options=QUICK) as session,
        PushingWorker(service.address, run_id),
    ):
        timer = threading.Timer(0.5, client.continue_run, [run_id])
        timer.start()
        for batch in session:
            seen += ids(batch)
        timer.join()
    assert sorted(seen) == sorted(f"t{i}" for i in range(6))


def test_a_drained_run_trains_what_it_has_and_ends(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    seen: list[str] = []
    options = SessionOptions(pull_timeout_s=30, max_pending_tasks=8, chunk_tasks=4)
    with (
        client.session(run_id, policy=BLOCKING, tasks=endless(), options=options) as session,
        PushingWorker(service.address, run_id),
    ):
        for batch in session:
            seen += ids(batch)
            session.publish()
            if batch.step == 2:
                client.drain_run(run_id)
                assert session.state().draining
        run = session.state()
    assert len(seen) == len(set(seen)) == run.ledger.groups.trained.groups
    assert (run.ledger.tasks.leased, run.ledger.groups.queued.groups < 2, run.paused) == (0, True, "")
    assert run.ledger.balanced
    client.continue_run(run_id)
    assert not client.run(run_id).draining
    # The tasks that were pending are leased again.
    with (
        client.session(run_id, tasks=endless(), options=QUICK) as session,
        PushingWorker(service.address, run_id),
    ):
        assert len(next(session).groups) == 2


def test_a_deleted_run_is_gone_and_its_name_is_free(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    with client.session(run_id, policy=BLOCKING, tasks=tasks(2), options=QUICK), PushingWorker(service.address, run_id):
        pass
    client.delete_run(run_id)
    assert run_id not in client.runs()
    with pytest.raises(UnknownRun):
        client.run(run_id)
    with pytest.raises(UnknownRun):
        client.delete_run(run_id)
    # The same client, which has seen higher revisions of the first run of this name.
    with client.session(run_id, policy=BLOCKING, tasks=tasks(2), options=QUICK) as session:
        with PushingWorker(service.address, run_id):
            assert len(next(session).groups) == 2
        assert (session.term, session.state().paused) == (2, "")


def test_a_curriculum_changes_what_is_trained_next(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    policy = Policy(
        batch_groups=4, max_queued_groups=40, environments={"easy": 3, "hard": Environment(share=1)}, order="fifo"
    )
    with client.session(run_id, policy=policy, options=QUICK) as session:
        with Pusher(service.address, run_id) as pusher:
            for environment in ("easy", "hard"):
                pusher.push(*[with_environment(f"{environment}{i}", environment) for i in range(12)])
        assert environments(next(session)) == {"easy": 3, "hard": 1}
        session.update_policy(environments={"easy": 0, "hard": 1})
        assert environments(next(session)) == {"hard": 4}
        assert client.update_policy(run_id, environments={"easy": 1, "hard": 1}).environments == {
            "easy": Environment(share=1),
            "hard": Environment(share=1),
        }
        last = environments(next(session))
        assert set(last) == {"easy", "hard"}
        session.publish()
        ledger = client.ledger(run_id)
    assert ledger.balanced
    trained = {"easy": 3 + last["easy"], "hard": 5 + last["hard"]}
    assert {name: part.trained.groups for name, part in ledger.environments.items()} == trained
    queued = {name: part.queued.groups for name, part in ledger.environments.items()}
    assert queued == {name: 12 - count for name, count in trained.items()}
    assert session.policy.batch_groups == 4


def with_environment(task_id: str, environment: str) -> GroupArrays:
    return replace(arrays_for(task_id), environment=environment)


def environments(batch: Batch) -> dict[str, int]:
    names = [group.environment for group in batch.groups]
    return {name: names.count(name) for name in sorted(set(names))}


def test_a_policy_that_cannot_be_is_refused_whole(client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=4, max_staleness=2))
    with pytest.raises(InvalidPolicy):
        client.update_policy(run_id, micro_batch_groups=5)
    assert client.run(run_id).policy.micro_batch_groups == 0


def test_a_preset_is_filled_in_where_nothing_is_said(client: BufferClient, run_id: str) -> None:
    policy = client.create_run(run_id, Policy(preset="miles", batch_groups=7)).policy
    assert (policy.batch_groups, policy.preset) == (7, "miles")
    # The effective policy can be sent back as it is.
    assert client.update_policy(run_id, policy) == policy
    assert client.update_policy(run_id, max_attempts=2).max_attempts == 2


def test_the_asyncio_client_controls_runs_too(service: ServiceProcess, run_id: str) -> None:
    async def story() -> None:
        async with AsyncBufferClient(service.address, ClientOptions(timeout_s=20)) as client:
            await client.create_run(run_id, BLOCKING)
            await client.pause_run(run_id)
            assert (await client.run(run_id)).paused == "operator"
            with pytest.raises(RunPaused):
                await client.pull(run_id, term=1, step=0, timeout_s=0.2)
            await client.continue_run(run_id)
            await client.drain_run(run_id)
            with pytest.raises(RunPaused) as raised:
                await client.pull(run_id, term=1, step=0, timeout_s=5)
            assert raised.value.attributes["why"] == "drained"
            assert (await client.update_policy(run_id, order="lifo")).order == "lifo"
            await client.delete_run(run_id)
            assert run_id not in await client.runs()

    asyncio.run(story())
