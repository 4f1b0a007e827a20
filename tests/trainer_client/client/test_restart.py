"""A training loop over a service that is killed in its middle."""

import threading
from pathlib import Path

import pytest

from buffer_wire.status import ServiceUnreachable
from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess, running_service
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task

pytestmark = pytest.mark.faults

STEPS, BATCH = 30, 3


def tasks() -> list[Task]:
    sampling = SamplingParams(max_new_tokens=8)
    return [
        Task(task_id=f"t{i}", group_size=2, sampling=sampling, prompt_token_ids=[1, 2]) for i in range(STEPS * BATCH)
    ]


class Killer:
    """Kills the service when told to and starts it again, in a thread of its own."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self.thread: threading.Thread | None = None

    def strike(self) -> None:
        self._service.kill()
        self.thread = threading.Thread(target=self._service.start)
        self.thread.start()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join(60)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_loop_goes_on_and_trains_on_every_group_once(tmp_path: Path, prefetch: int) -> None:
    policy = Policy(batch_groups=BATCH, max_queued_groups=4 * BATCH, overflow_action="block", lease_ttl_ms=5_000)
    # Few tasks at once, so that feeding, too, is under way when the service is killed.
    options = SessionOptions(pull_timeout_s=90, max_pending_tasks=8, chunk_tasks=4)
    trained: list[str] = []
    with (
        running_service(tmp_path) as service,
        BufferClient(service.address, ClientOptions(timeout_s=90)) as client,
    ):
        killer = Killer(service)
        with (
            PushingWorker(service.address, "r", patience_s=90) as worker,
            client.session("r", policy=policy, tasks=tasks(), prefetch=prefetch, options=options) as session,
        ):
            for batch in session:
                trained += [group.task_id for group in batch.groups]
                if batch.step in (5, 12, 20):
                    killer.join()
                    killer.strike()
                session.publish()
            assert session.next_step == STEPS
            assert session.start.term == session.state().term
        killer.join()
        run = client.run("r")
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    assert set(worker.acknowledged) <= set(trained)
    assert run.ledger.balanced
    assert (run.ledger.groups.accepted.groups, run.ledger.groups.trained.groups) == (STEPS * BATCH, STEPS * BATCH)
    assert (run.committed_steps, run.published.version, run.cursor) == (STEPS, STEPS, STEPS * BATCH)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_micro_batches_go_on_over_a_service_that_is_killed_within_a_step(tmp_path: Path, prefetch: int) -> None:
    policy = Policy(
        batch_groups=BATCH,
        micro_batch_groups=1,
        max_queued_groups=2 * BATCH,
        overflow_action="block",
        lease_ttl_ms=5_000,
    )
    options = SessionOptions(pull_timeout_s=90, max_pending_tasks=8, chunk_tasks=4)
    places: list[tuple[int, int, bool]] = []
    trained: list[str] = []
    with (
        running_service(tmp_path) as service,
        BufferClient(service.address, ClientOptions(timeout_s=90)) as client,
    ):
        killer = Killer(service)
        with (
            PushingWorker(service.address, "r", patience_s=90),
            client.session("r", policy=policy, tasks=tasks(), prefetch=prefetch, options=options) as session,
        ):
            for micro in session.micro_batches():
                places.append((micro.step, micro.micro_batch, micro.final))
                trained += [group.task_id for group in micro.groups]
                if micro.step in (5, 12) and micro.micro_batch == 1:
                    killer.join()
                    killer.strike()
                if micro.final:
                    assert micro.info.total_groups == BATCH
                    session.publish()
        killer.join()
        run = client.run("r")
    assert places == [
        (step, micro_batch, micro_batch == BATCH - 1) for step in range(STEPS) for micro_batch in range(BATCH)
    ]
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    assert run.ledger.balanced
    assert (run.ledger.groups.trained.groups, run.committed_steps) == (STEPS * BATCH, STEPS)


@pytest.mark.timeout(120)
def test_a_trainer_and_a_service_that_die_together_are_resumed_exactly(tmp_path: Path) -> None:
    """Both ends are gone at once: nothing but the store and the trainer's checkpoint is left."""
    policy = Policy(batch_groups=BATCH, max_queued_groups=4 * BATCH, overflow_action="block")
    options = SessionOptions(pull_timeout_s=60, max_pending_tasks=8, chunk_tasks=4)
    before: dict[int, list[bytes]] = {}
    with running_service(tmp_path) as service, PushingWorker(service.address, "r", patience_s=60):
        with (
            BufferClient(service.address, ClientOptions(timeout_s=1)) as client,
            client.session("r", policy=policy, tasks=tasks(), options=options) as session,
        ):
            for step in range(9):
                before[step] = [bytes(group.payload) for group in next(session).groups]
                if step == 8:
                    service.kill()
                    break
                session.publish()
                if step == 4:
                    session.checkpoint()
            with pytest.raises(ServiceUnreachable):
                session.publish()
        service.start()
        with (
            BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
            client.session("r", tasks=tasks(), next_step=5, options=options) as session,
        ):
            replayed = [next(session) for _ in range(5, 9)]
            assert [[bytes(group.payload) for group in batch.groups] for batch in replayed] == [
                before[step] for step in range(5, 9)
            ]
            assert all(batch.info.replayed for batch in replayed)
            later = [group.task_id for batch in session for group in batch.groups]
    assert len(later) == len(set(later)) == (STEPS - 9) * BATCH
