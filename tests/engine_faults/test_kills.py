"""Kill -9 in the middle of a weight update, of everything that there is: nobody has to help, and nothing is lost.

Two workers with one engine each, and a trainer that publishes after every batch. What a worker or a service is to the
machine's init system, this test is to them: it starts a killed one again, the same command, at once. A killed engine is
the worker's own business.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engine_faults import recovery
from tests.engine_faults.fleet import RUN, Observer, Trainer, engine_of, fit
from tests.engine_matrix.cell import Load
from tests.engine_matrix.servers import READY_TIMEOUT_S, sglang_servers
from tests.engine_matrix.verdict import check_account, check_tasks
from tests.engine_matrix.workers import Worker
from tests.support.processes import children, command, descendants
from tests.support.service import ServiceProcess, running_service
from tests.support.sglang_python import sglang_python
from trainer_client.state import RunState

NAMES = ("a", "b")
LOAD = Load(group_size=4, groups_per_engine=3, lengths=(40, 200, 120, 80))

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.timeout(2_400)]


@dataclass(slots=True)
class Fleet:
    """Everything that runs. `flags` are those of each worker."""

    service: ServiceProcess
    trainer: Trainer
    observer: Observer
    folder: Path
    flags: Mapping[str, tuple[str, ...]]
    workers: dict[str, Worker] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a worker, again under its old name."""
        self.workers[name] = Worker(self.service.address, RUN, self.folder / name, *self.flags[name], worker_id=name)

    def all_fit(self, version: int, what: str) -> float:
        """Wait until both engines have a version; when that was seen."""
        _, at = self.observer.until(lambda state: fit(state.engines, version, len(NAMES)), what)
        return at

    def in_an_update(self, engine_id: str) -> RunState:
        """Wait until the engine is being loaded."""
        state, _ = self.observer.until(
            lambda state: engine_of(state, engine_id).state == "loading", f"{engine_id} is being loaded"
        )
        return state

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers.values():
            with contextlib.suppress(Exception):
                worker.stop()
            worker.kill()
        self.observer.close()


@contextlib.contextmanager
def fleet(folder: Path, flags: Mapping[str, tuple[str, ...]]) -> Iterator[Fleet]:
    """A fleet at work, both engines with version 1 at least; the workers' logs are printed when the test fails."""
    with running_service(folder / "service") as service, Trainer(service.address, folder / "trainer", LOAD) as trainer:
        running = Fleet(service, trainer, Observer(service.address, trainer), folder, flags)
        try:
            for name in NAMES:
                running.start(name)
            running.all_fit(1, "both engines have weights of the trainer")
            yield running
        except BaseException:
            for worker in running.workers.values():
                print(f"--- end of the log of worker {worker.worker_id}\n{worker.said()[-4000:]}")
            raise
        finally:
            running.close()


def recover(fleet: Fleet, killed: str, victim: str, kill: Callable[[], None]) -> None:
    """Kill in the middle of an update of the victim's engine, and measure until all is well."""
    before = fleet.in_an_update(f"{victim}.e0")
    kill()
    began = time.monotonic()
    accepted = before.ledger.groups.accepted.groups
    newest = before.published.version
    _, group_at = fleet.observer.until(
        lambda state: state.ledger.groups.accepted.groups > accepted, "another group was accepted"
    )
    newest_at = fleet.all_fit(newest, f"both engines have version {newest}")
    recovery.note(recovery.Recovery(killed, group_at - began, newest_at - began))
    # Not only back, but at work.
    fleet.all_fit(newest + 3, "both engines go along with the updates")


def check_end(fleet: Fleet, *, engines_killed: bool) -> None:
    """Everything that was submitted is delivered, its versions are right, the living account for their tokens."""
    fleet.trainer.finish()
    seen = fleet.trainer.seen
    for worker in fleet.workers.values():
        assert worker.stop() == 0
        check_account(worker.last_words())
    state, _ = fleet.observer.until(lambda state: state.ledger.tasks.leased == 0, "no lease is open")
    check_tasks(seen, fleet.trainer.tasks.drawn, state)
    # What a killed engine had sent comes without its spans: then tokens since the last update may be taken for older
    # ones, and never for newer ones.
    print(f"\n{seen.tokens} tokens, {seen.mislabelled} of them taken for older ones, {seen.wrong}")
    assert seen.mislabelled == (seen.overstated if engines_killed else 0)
    assert seen.spanning_samples > 0


def server_of(worker: Worker) -> int:
    """The process of the SGLang server that a worker has launched."""
    return next(pid for pid in children(worker.process.pid) if "sglang.launch_server" in command(pid))


def scheduler_of(worker: Worker) -> int:
    """The process of that server that runs the model."""
    return next(pid for pid in descendants(server_of(worker)) if "scheduler" in command(pid))


def test_killed_engines_workers_and_services_recover_in_the_middle_of_updates(base: Path, tmp_path: Path) -> None:
    launched = (
        "--launch", str(base), "--sglang-python", str(sglang_python()), "--ready-timeout-s", str(READY_TIMEOUT_S),
        "--groups-per-engine", str(LOAD.groups_per_engine), "--lease-wait-s", "2",
    )  # fmt: skip
    with fleet(tmp_path, dict.fromkeys(NAMES, launched)) as running:
        workers = running.workers

        def kill_engine() -> None:
            os.kill(server_of(workers["a"]), signal.SIGKILL)

        def kill_scheduler() -> None:
            os.kill(scheduler_of(workers["a"]), signal.SIGKILL)

        def kill_worker() -> None:
            workers["b"].kill()
            running.start("b")

        def kill_service() -> None:
            running.service.kill()
            running.service.start()

        def kill_store() -> None:
            os.kill(store_of(running.service), signal.SIGKILL)

        recover(running, "engine, launched by its worker", "a", kill_engine)
        recover(running, "the engine's scheduler process alone", "a", kill_scheduler)
        recover(running, "worker, and with it the engine that it launched", "b", kill_worker)
        recover(running, "service, all processes", "a", kill_service)
        recover(running, "the service's store alone", "b", kill_store)
        check_end(running, engines_killed=True)


def test_a_killed_worker_finds_its_engine_again_which_it_left_paused(base: Path, tmp_path: Path) -> None:
    with sglang_servers(tmp_path / "servers", (base, base)) as servers:
        flags = {
            name: (
                "--engine", url, "--base-model", str(base), "--lease-wait-s", "2",
                "--groups-per-engine", str(LOAD.groups_per_engine),
            )
            for name, url in zip(NAMES, servers.urls, strict=True)
        }  # fmt: skip
        with fleet(tmp_path, flags) as running:

            def kill_worker() -> None:
                running.workers["a"].kill()
                running.start("a")

            for _ in range(3):
                recover(running, "worker, its engine runs elsewhere", "a", kill_worker)
            check_end(running, engines_killed=False)


def store_of(service: ServiceProcess) -> int:
    """The process of the embedded store."""
    return next(pid for pid in children(service.pid) if "valkey" in command(pid) or "redis" in command(pid))
