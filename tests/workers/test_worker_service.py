"""A worker process with simulated engines, the real service and a real trainer session: the loop without SGLang."""

import dataclasses
import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer_wire.errors import FailureBudgetExceeded
from rollout_workers.main import EXIT_KILLED
from tests.support.service import ServiceProcess, running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task
from trainer_client.publish import FilesPublisher

FAST = ("--simulate", "--tokens-per-s", "400", "--groups-per-engine", "8", "--lease-wait-s", "1")
SLOW = ("--simulate", "--tokens-per-s", "20", "--groups-per-engine", "4", "--lease-wait-s", "1")
OPTIONS = SessionOptions(pull_timeout_s=60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[BufferClient]:
    with BufferClient(service.address, ClientOptions(timeout_s=60)) as made:
        yield made


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].rstrip("-")


def endless(max_new_tokens: int = 48, group_size: int = 4) -> Iterator[Task]:
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:05d}",
            group_size=group_size,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            prompt_token_ids=[1 + i % 7, 2, 3],
            metadata={"i": i},
        )


def write_weights(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors").write_bytes(content)


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.05)


def seen_once(seen: set[str], task_ids: list[str]) -> None:
    assert len(set(task_ids)) == len(task_ids)
    assert seen.isdisjoint(task_ids)
    seen.update(task_ids)


@pytest.mark.parametrize("serve", ["path", "http"])
def test_loop_trains_publishes_and_reloads(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, serve: str
) -> None:
    seen: set[str] = set()
    policy = Policy(batch_groups=8, max_staleness=2, overflow_action="block")
    with (
        FilesPublisher(tmp_path / "published", serve=serve) as publisher,  # type: ignore[arg-type]
        worker_process(service.address, run_id, tmp_path, *FAST, "--engines", "2") as worker,
        client.session(run_id, policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as session,
    ):
        for batch in itertools.islice(session, 12):
            seen_once(seen, [group.task_id for group in batch.groups])
            assert all(sample.reward == sample.tokens - sample.prompt_len for sample in batch.samples)
            session.publish(write_weights(b"%d" % batch.step))
        until(
            lambda: [engine.loaded.version for engine in client.run(run_id).engines] == [12, 12], "both engines at 12"
        )
        assert worker.stop() == 0
    state = client.run(run_id)
    assert state.ledger.groups.balanced
    assert state.ledger.tasks.balanced
    assert state.statistics["staleness_max"] <= 2
    assert all(engine.reloads >= 3 and engine.errors == 0 for engine in state.engines)
    assert state.ledger.tasks.leased == 0
    assert state.statistics["leases_expired"] == 0


def test_killed_service_comes_back_and_the_loop_goes_on(tmp_path: Path) -> None:
    seen: set[str] = set()
    policy = Policy(batch_groups=4, max_queued_groups=16, overflow_action="block")
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        FilesPublisher(tmp_path / "published") as publisher,
        worker_process(service.address, "r", tmp_path, *FAST) as worker,
        client.session("r", policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as session,
    ):
        for batch in itertools.islice(session, 15):
            seen_once(seen, [group.task_id for group in batch.groups])
            session.publish(write_weights(b"%d" % batch.step))
            if batch.step in (4, 9):
                service.kill()
                service.start()
        assert worker.process.poll() is None
        assert worker.stop() == 0
        state = client.run("r")
    assert state.ledger.groups.balanced
    assert state.ledger.tasks.balanced
    assert state.ledger.groups.trained.groups == 60
    assert state.ledger.tasks.failed == 0


def test_stopped_worker_hands_its_work_to_the_next(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=60), 4))
    with client.session(run_id, policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS) as session:
        with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
            until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
            time.sleep(0.7)
            assert worker.stop() == 0
        state = client.run(run_id)
        assert (state.ledger.tasks.pending, state.ledger.tasks.leased, state.statistics["leases_returned"]) == (4, 0, 4)
        with worker_process(service.address, run_id, tmp_path, *FAST, worker_id="w2") as second:
            batch = next(session)
            assert second.stop() == 0
    assert sorted(group.task_id for group in batch.groups) == [task.task_id for task in tasks]
    assert "continuation not used" not in second.said()
    state = client.run(run_id)
    assert state.statistics["continuation_tokens_discarded"] == 0
    assert state.ledger.tasks.completed == 4


def test_killed_worker_loses_its_leases_by_expiry(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=400), 4))
    policy = Policy(batch_groups=4, lease_ttl_ms=1_000, retry_backoff_ms=50)
    with client.session(run_id, policy=policy, tasks=tasks, options=OPTIONS) as session:
        with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
            until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
            worker.kill()
        with worker_process(service.address, run_id, tmp_path, *FAST, worker_id="w2") as second:
            assert len(next(session).groups) == 4
            assert second.stop() == 0
    assert client.run(run_id).statistics["leases_expired"] == 4


def test_restarted_worker_of_the_same_name_gets_its_tasks_back_at_once(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=400), 4))
    with client.session(run_id, policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS) as session:
        with worker_process(service.address, run_id, tmp_path, *SLOW) as worker:
            until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
            worker.kill()
        with worker_process(service.address, run_id, tmp_path, *FAST) as second:
            # The leases would live for a minute.
            assert len(next(session).groups) == 4
            assert second.stop() == 0
    assert client.run(run_id).statistics["leases_expired"] == 0


def test_worker_that_comes_first_waits_for_the_run(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    with worker_process(service.address, run_id, tmp_path, *FAST) as worker:
        until(lambda: "the trainer, which creates the run" in worker.said(), "the worker says on whom it waits")
        tasks = list(itertools.islice(endless(), 2))
        with client.session(run_id, policy=Policy(batch_groups=2), tasks=tasks, options=OPTIONS) as session:
            assert len(next(session).groups) == 2
        assert worker.stop() == 0


def test_resumed_trainer_takes_the_workers_back_to_its_version(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_staleness=2)
    with (
        FilesPublisher(tmp_path / "published", keep=10) as publisher,
        worker_process(service.address, run_id, tmp_path, *FAST) as worker,
    ):
        with client.session(run_id, policy=policy, tasks=endless(), publisher=publisher, options=OPTIONS) as first:
            for batch in itertools.islice(first, 6):
                first.publish(write_weights(b"%d" % batch.step))
            epoch = first.epoch
        with client.session(run_id, tasks=endless(), publisher=publisher, next_step=3, options=OPTIONS) as second:
            assert second.version == 3
            until(
                lambda: (
                    (client.run(run_id).engines[0].loaded.epoch, client.run(run_id).engines[0].loaded.version)
                    == (epoch + 1, 3)
                ),
                "the engine is back at version 3",
            )
            for batch in itertools.islice(second, 6):
                second.publish(write_weights(b"again %d" % batch.step))
        assert worker.stop() == 0
    state = client.run(run_id)
    assert state.ledger.groups.balanced
    assert state.ledger.tasks.failed == 0


def test_reward_that_fails_ends_in_a_failed_task_with_its_error(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    bad = Task(group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 9_999], task_id="bad")
    good = Task(group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2], task_id="good")
    policy = Policy(batch_groups=1, max_attempts=2, retry_backoff_ms=10)
    with (
        worker_process(service.address, run_id, tmp_path, *FAST) as worker,
        client.session(run_id, policy=policy, tasks=[bad, good], options=OPTIONS) as session,
    ):
        assert [group.task_id for group in next(session).groups] == ["good"]
        until(lambda: client.ledger(run_id).tasks.failed == 1, "the bad task has failed")
        assert worker.stop() == 0
    failure = client.run(run_id).failures[0]
    assert (failure.task_id, failure.attempts) == ("bad", 2)
    assert "token id 9999" in failure.error


def interrupted(service: ServiceProcess, client: BufferClient, run_id: str, folder: Path) -> None:
    """Four leases are begun by a worker that is stopped, so that four continuations of version 0 are left."""
    with worker_process(service.address, run_id, folder, *SLOW, worker_id="first") as worker:
        until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
        time.sleep(0.7)
        assert worker.stop() == 0
    assert client.ledger(run_id).tasks.pending == 4


@pytest.mark.parametrize(("spread", "kept"), [(1, False), (5, True)])
def test_continuation_beyond_the_spread_starts_anew(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, spread: int, kept: bool
) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=200), 4))
    policy = Policy(batch_groups=4, max_version_spread=spread)
    with client.session(run_id, policy=policy, tasks=tasks, options=OPTIONS) as session:
        interrupted(service, client, run_id, tmp_path)
        for _ in range(3):
            session.publish()
        with worker_process(service.address, run_id, tmp_path, *FAST, worker_id="second") as worker:
            batch = next(session)
            assert worker.stop() == 0
        state = session.state()
    versions = {tuple(span.version.version for span in sample.spans) for sample in batch.samples}
    assert versions == ({(0, 3)} if kept else {(3,)})
    assert {group.generation for group in batch.groups} == {0}
    assert state.statistics["continuations_beyond_spread"] == (0 if kept else 4)
    assert (state.statistics["continuation_tokens_discarded"] > 0) == (not kept)


def test_lease_that_can_no_longer_be_fresh_is_taken_back_and_begun_anew(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    # Heartbeats are minutes apart, unless something is published.
    policy = Policy(batch_groups=4, max_staleness=1, cancel_stale_leases=True, lease_ttl_ms=600_000)
    tasks = list(itertools.islice(endless(max_new_tokens=60), 4))
    with (
        client.session(run_id, policy=policy, tasks=tasks, options=OPTIONS) as session,
        worker_process(service.address, run_id, tmp_path, *SLOW) as worker,
    ):
        until(lambda: client.ledger(run_id).tasks.leased == 4, "four leases")
        session.publish()
        session.publish()
        until(lambda: client.run(run_id).statistics["leases_cancelled"] == 4, "four cancelled leases", 10)
        batch = next(session)
        assert worker.stop() == 0
        state = session.state()
    assert {sample.spans[0].version.version for sample in batch.samples} == {2}
    assert batch.info.staleness_max == 0
    assert "lease cancelled" in worker.said()
    # Nobody's attempt has failed.
    assert (state.ledger.tasks.failed, state.statistics["leases_expired"], state.ledger.groups.accepted.groups) == (
        0,
        0,
        4,
    )
    assert state.ledger.balanced


def test_worker_waits_while_the_run_drains_and_goes_on_when_it_is_continued(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
    with (
        client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session,
        worker_process(service.address, run_id, tmp_path, *FAST) as worker,
    ):
        next(session)
        client.drain_run(run_id)
        batches = sum(1 for _ in session)
        state = session.state()
        assert (state.ledger.tasks.leased, state.draining) == (0, True)
        assert state.ledger.groups.queued.groups < 4
        until(lambda: "being drained" in worker.said(), "the worker says why it is idle")
        assert worker.process.poll() is None
        client.continue_run(run_id)
        assert next(session).step == batches + 1
        assert worker.stop() == 0
    assert client.run(run_id).ledger.balanced


def test_worker_outlives_a_run_that_is_deleted_and_made_anew(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
    with worker_process(service.address, run_id, tmp_path, *FAST) as worker:
        with client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session:
            for _ in range(3):
                next(session)
                session.publish()
        client.delete_run(run_id)
        until(lambda: "the trainer, which creates the run" in worker.said(), "the worker misses the run")
        with client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session:
            for _ in range(3):
                assert len(next(session).groups) == 4
                session.publish()
            assert session.state().paused == ""
        assert worker.stop() == 0


def test_second_signal_ends_a_drain_that_nobody_answers(tmp_path: Path) -> None:
    tasks = list(itertools.islice(endless(max_new_tokens=400), 4))
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        client.session("r", policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS),
        worker_process(service.address, "r", tmp_path, *SLOW, "--drain-grace-s", "600") as worker,
    ):
        until(lambda: client.ledger("r").tasks.leased == 4, "four leases")
        service.kill()
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: "to='return leases'" in worker.said(), "the worker tries to hand its work back")
        assert worker.process.poll() is None
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(10) == EXIT_KILLED
        service.start()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--reward", "tests.workers.reward_functions:broken"), "PermissionError: the judge does not know us"),
        (
            ("--reward", "tests.workers.reward_functions:broken", "--reward-processes", "1"),
            "PermissionError: the judge does not know us",
        ),
        (
            ("--rollout", "tests.workers.rollout_functions:broken"),
            "ConnectionError: the sandbox does not answer",
        ),
    ],
    ids=["thread", "process", "rollout"],
)
def test_error_of_user_code_stops_the_trainer(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    policy = Policy(batch_groups=4, max_attempts=2, retry_backoff_ms=100, failure_budget=1)
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, "--max-sample-attempts", "1", *flags),
        client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session,
    ):
        with pytest.raises(FailureBudgetExceeded) as caught:
            next(iter(session))
        assert why in str(caught.value)
        assert int(caught.value.attributes["failed"]) >= 2
        state = client.run(run_id)
    assert state.paused == "failure_budget_exceeded"
    assert state.ledger.tasks.failed >= 2


def test_turns_of_a_rollout_function_reach_the_trainer(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    flags = ("--rollout", "tests.workers.rollout_functions:two_turns")
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, *flags),
        client.session(run_id, policy=Policy(batch_groups=4), tasks=endless(), options=OPTIONS) as session,
    ):
        batch = next(iter(session))
    for sample in batch.samples:
        assert sample.reward == sample.loss_mask.sum() <= 16
        assert sample.loss_mask[sample.prompt_len :].sum() == sample.tokens - sample.prompt_len - 2


def test_stopped_worker_leaves_no_reward_process_behind(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    flags = ("--reward", "tests.workers.reward_functions:obedient", "--reward-processes", "2")
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, *flags) as worker,
        client.session(run_id, policy=Policy(batch_groups=4), tasks=endless(), options=OPTIONS) as session,
    ):
        next(iter(session))
        pids = re.findall(r"reward process started.*pid=(\d+)", worker.said())
        assert pids
        assert worker.stop() == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are gone")


def test_killed_worker_leaves_no_reward_process_behind(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    flags = ("--reward", "tests.workers.reward_functions:obedient", "--reward-processes", "1")
    tasks = (dataclasses.replace(task, metadata={"0": "hang"}) for task in endless())
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, *flags) as worker,
        client.session(run_id, policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS),
    ):
        until(lambda: "reward process started" in worker.said(), "a process is started")
        (pid, *_) = re.findall(r"reward process started.*pid=(\d+)", worker.said())
        worker.kill()
        until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone, though the function hangs")
