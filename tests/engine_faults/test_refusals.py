"""An engine that refuses to load is quarantined within its deadline and gets no work; the others go on, and it comes
back with the first weights that it can load.

Two real servers of one worker, of which the second serves a model with wider layers: no weights fit both.
"""

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine_faults.fleet import RUN, WITHIN_S
from tests.engine_matrix.cell import Load, Tasks, policy
from tests.engine_matrix.servers import Servers, sglang_servers
from tests.engine_matrix.truth import SHAPE, Seen, write_version
from tests.engine_matrix.verdict import check_tasks, check_tokens
from tests.engine_matrix.workers import Worker, worker
from tests.support.service import running_service
from trainer_client import BufferClient, ClientOptions, SessionOptions
from trainer_client.batch import Batch
from trainer_client.publish import FilesPublisher
from trainer_client.session.session import TrainerSession
from trainer_client.state import Engine, RunState

OTHER_SHAPE = replace(SHAPE, intermediate=2 * SHAPE.intermediate)
DEADLINE_S = 5.0
"""--reload-timeout-s of the worker."""
SLACK_S = 10.0
"""Time that is not the load's own: until the worker has heard of the publish, for the service's permit of each attempt,
and until the trainer has heard of the quarantine. How long a load itself may take is held by tests/workers."""
AT_REST_LOOKS = 20
LOAD = Load(group_size=4, groups_per_engine=3, lengths=(40, 200, 120, 80))

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.timeout(900)]


def fitting(version: int) -> Callable[[Path], object]:
    """Weights that the first engine can load."""
    return lambda directory: write_version(directory, version, 0)


def other(version: int) -> Callable[[Path], object]:
    """Weights that the second engine can load."""
    return lambda directory: write_version(directory, version, 0, shape=OTHER_SHAPE)


class Story:
    """One run, told by the trainer."""

    def __init__(self, session: TrainerSession, servers: Servers) -> None:
        self.session = session
        self.servers = servers
        self.seen = Seen()

    def train(self, batches: int) -> list[Batch]:
        """Take so many batches, and commit them."""
        taken = [next(self.session) for _ in range(batches)]
        for batch in taken:
            self.seen.add(batch)
        self.session.commit()
        return taken

    def until(self, holds: Callable[[Engine, Engine], bool], what: str, within_s: float = WITHIN_S) -> RunState:
        """Take batches, for nobody waits for a sick engine, until something holds of the two engines."""
        deadline = time.monotonic() + within_s
        while True:
            state = self.session.state()
            first, second = sorted(state.engines, key=lambda engine: engine.engine_id)
            if holds(first, second):
                return state
            assert time.monotonic() < deadline, f"still not: {what}; the engines are {first} and {second}"
            if state.ledger.groups.queued.groups >= 4:
                self.train(1)
            time.sleep(0.02)

    def running(self, index: int) -> int:
        """Requests that a server has, running and waiting, by its own account."""
        with urllib.request.urlopen(f"{self.servers.urls[index]}/v1/loads", timeout=10) as answer:
            loads = json.load(answer)["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@contextlib.contextmanager
def story(tmp_path: Path, servers: Servers) -> Iterator[tuple[Story, Tasks, Worker]]:
    """Both engines at work with the weights that they started with."""
    tasks = Tasks(LOAD)
    options = SessionOptions(pull_timeout_s=WITHIN_S, max_pending_tasks=16, chunk_tasks=4)
    flags = [flag for url in servers.urls for flag in ("--engine", url)]
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        FilesPublisher(tmp_path / "published") as publisher,
        client.session(RUN, policy=policy(), tasks=tasks, publisher=publisher, options=options) as session,
        worker(
            service.address, RUN, tmp_path / "worker", *flags, "--lease-wait-s", "1",
            "--groups-per-engine", str(LOAD.groups_per_engine), "--reload-timeout-s", str(DEADLINE_S), worker_id="w",
        ) as running,
    ):  # fmt: skip
        told = Story(session, servers)
        deadline = time.monotonic() + WITHIN_S
        while len(session.state().engines) < len(servers.urls):
            assert time.monotonic() < deadline, "the worker does not report its engines"
            time.sleep(0.05)
        yield told, tasks, running


def end(told: Story, tasks: Tasks, running: Worker) -> None:
    """Every task that was submitted is delivered, and its tokens are right."""
    tasks.stop()
    for batch in told.session:
        told.seen.add(batch)
    told.session.commit()
    assert running.stop() == 0
    state = told.session.state()
    check_tasks(told.seen, tasks.drawn, state)
    check_tokens([running.last_words()], told.seen, state)
    assert told.seen.mislabelled == 0


def idle(told: Story, index: int) -> None:
    """The server comes to rest, and gets nothing while the trainer gets eight more batches."""
    at_rest, deadline = 0, time.monotonic() + 60
    # What it had when it was quarantined may end; in the middle of a pause its account can be 0 for a moment.
    while at_rest < AT_REST_LOOKS:
        at_rest = 0 if told.running(index) else at_rest + 1
        assert time.monotonic() < deadline, "a quarantined engine still has requests"
        time.sleep(0.05)
    watch, over = [], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            watch.append(told.running(index))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        told.train(8)
    finally:
        over.set()
        looking.join()
    assert len(watch) > 5
    assert set(watch) == {0}


def test_an_engine_of_another_model_is_quarantined_and_rejoins_with_weights_of_its_own(tmp_path: Path) -> None:
    models = (write_version(tmp_path / "a", 0, 0), write_version(tmp_path / "b", 0, 0, shape=OTHER_SHAPE))
    with (
        sglang_servers(tmp_path / "servers", models) as servers,
        story(tmp_path, servers) as (told, tasks, running),
    ):
        told.until(lambda a, b: a.state == b.state == "ready", "both serve the weights they started with")
        told.train(2)

        version = told.session.publish(fitting(1))
        began = time.monotonic()
        told.until(
            lambda a, b: a.state == "ready" and a.loaded.version == version and b.state == "quarantined",
            "the second engine is quarantined",
            DEADLINE_S + SLACK_S,
        )
        print(f"\nquarantined {time.monotonic() - began:.1f} s after the publish, deadline {DEADLINE_S} s")
        idle(told, 1)

        version = told.session.publish(other(2))
        began = time.monotonic()
        told.until(lambda a, b: b.state == "ready" and b.loaded.version == version, "the second engine is back")
        print(f"back {time.monotonic() - began:.1f} s after the publish of weights that fit")
        told.until(lambda a, b: a.state == "quarantined", "now the first one is", DEADLINE_S + SLACK_S)
        idle(told, 0)

        version = told.session.publish(fitting(3))
        told.until(lambda a, b: a.state == "ready" and a.loaded.version == version, "the first engine is back")
        end(told, tasks, running)


def test_a_version_that_is_not_what_its_manifest_says_is_loaded_by_nobody_and_the_next_one_by_all(
    tmp_path: Path,
) -> None:
    models = (write_version(tmp_path / "a", 0, 0), write_version(tmp_path / "b", 0, 0))
    with (
        sglang_servers(tmp_path / "servers", models) as servers,
        story(tmp_path, servers) as (told, tasks, running),
    ):
        told.until(lambda a, b: a.state == b.state == "ready", "both serve the weights they started with")
        told.session.publish(fitting(1))
        told.until(lambda a, b: a.loaded.version == b.loaded.version == 1, "both have version 1")
        with FilesPublisher(tmp_path / "spoilt") as publisher:
            manifest = publisher.write(fitting(2), term=told.session.term, version=2)
            for file in Path(manifest.base_url).glob("*.safetensors"):
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
            told.session.publish(manifest)
            state = told.until(
                lambda a, b: a.state == b.state == "quarantined", "both are quarantined", DEADLINE_S + SLACK_S
            )
        assert all("SHA-256" in engine.last_error for engine in state.engines)
        assert all(engine.loaded.version == 1 for engine in state.engines)
        told.session.publish(fitting(3))
        told.until(
            lambda a, b: a.state == b.state == "ready" and a.loaded.version == b.loaded.version == 3,
            "both have version 3",
        )
        end(told, tasks, running)
