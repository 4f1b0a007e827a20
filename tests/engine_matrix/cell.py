"""One cell of the matrix: a run under load with update after update, and everything that it was afterwards.

There are a service, two SGLang servers, and a worker process that leases, generates and pushes. A trainer pulls,
publishes and waits until both engines have the version before it publishes the next. Half-way the worker is told to end
and another one takes its place, so that partial rollouts travel. At the end the trainer stops to submit, and every task
is waited for.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine_matrix import kinds, workers
from tests.engine_matrix.truth import Seen, write_version
from tests.engine_matrix.verdict import check_tasks, check_tokens
from tests.engine_matrix.workers import Worker
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task
from trainer_client.session.session import TrainerSession
from trainer_client.state import Engine, RunState

ENGINES = 2
BATCH_GROUPS = 4
_UPDATE_TIMEOUT_S = 90.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """Amount that is generated. Lengths go round, so that samples begin and end at all times; a batch of them takes
    about as long as two engines need for an update, so that most samples live through one or two.
    """

    group_size: int = 4
    groups_per_engine: int = 4
    lengths: tuple[int, ...] = (15, 130, 40, 80, 105)
    """max_new_tokens of one task after another; a constant model never stops by itself."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A pause mode, a manifest kind, and how often weights are updated."""

    mode: str
    kind: str
    updates: int
    salt: int
    """Salt of its versions' tokens."""
    load: Load = Load()

    @property
    def run_id(self) -> str:
        return f"{self.mode}-{self.kind}"


@dataclass(slots=True)
class Outcome:
    """Outcome of a cell."""

    cell: Cell
    state: RunState
    seen: Seen = field(default_factory=Seen)
    submitted: int = 0
    reload_ms: list[int] = field(default_factory=list)
    """Times of every update on every engine, from pause to continue."""
    update_s: list[float] = field(default_factory=list)
    """Time from the call of `publish` until both engines have reported the version."""
    words: list[dict[str, Any]] = field(default_factory=list)
    """The last words of the workers."""
    wall_s: float = 0.0


class Tasks:
    """Tasks without end, until `stop`; then up to a whole number of batches."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._stopped = False
        self.drawn = 0

    def stop(self) -> None:
        """End with the batch that is begun."""
        self._stopped = True

    def __iter__(self) -> Iterator[Task]:
        load = self._load
        for i in itertools.count():
            if self._stopped and i % BATCH_GROUPS == 0:
                return
            self.drawn += 1
            yield Task(
                task_id=f"t{i:06d}",
                group_size=load.group_size,
                sampling=SamplingParams(max_new_tokens=load.lengths[i % len(load.lengths)], temperature=0.7),
                prompt_token_ids=[5 + (i + at) % 90 for at in range(3 + i % 37)],
            )


def policy() -> Policy:
    """Nothing is dropped, and no task may fail."""
    return Policy(
        batch_groups=BATCH_GROUPS, max_queued_groups=2 * BATCH_GROUPS, overflow_action="block", max_attempts=20,
        retry_backoff_ms=100, failure_budget=0,
    )  # fmt: skip


def run_cell(cell: Cell, folder: Path, address: str, urls: tuple[str, ...]) -> Outcome:
    """Run it in a run of its own at a service. The servers may hold whatever an earlier cell left."""
    began = time.monotonic()
    tasks = Tasks(cell.load)
    options = SessionOptions(pull_timeout_s=_UPDATE_TIMEOUT_S, max_pending_tasks=4 * BATCH_GROUPS, chunk_tasks=4)

    def start(worker_id: str) -> Any:
        return workers.worker(
            address, cell.run_id, folder / "worker",
            *itertools.chain(*(("--engine", url) for url in urls)),
            "--base-model", str(base), "--pause-mode", cell.mode, "--lease-wait-s", "2",
            "--groups-per-engine", str(cell.load.groups_per_engine),
            worker_id=worker_id, hidden=folder / "trainer" if cell.kind in kinds.HIDDEN else None,
        )  # fmt: skip

    (folder / "trainer").mkdir(parents=True)
    base = write_version(folder / "base", 0, cell.salt)
    with (
        BufferClient(address, ClientOptions(timeout_s=60)) as client,
        kinds.way(cell.kind, folder / "trainer", cell.salt) as way,
        client.session(cell.run_id, policy=policy(), tasks=tasks, publisher=way.publisher, options=options) as session,
    ):
        outcome = Outcome(cell, session.state(), Seen(cell.salt))
        first = cell.updates // 2
        with start("first") as worker:
            _update(session, way, outcome, worker, range(1, first + 1))
            if cell.kind in kinds.HIDDEN and workers.hiding():
                assert not worker.sees(folder / "trainer")
            assert worker.stop() == 0
            outcome.words.append(worker.last_words())
        with start("second") as worker:
            _update(session, way, outcome, worker, range(first + 1, cell.updates + 1))
            tasks.stop()
            for batch in session:
                outcome.seen.add(batch)
            session.commit()
            assert worker.stop() == 0
            outcome.words.append(worker.last_words())
        outcome.submitted = tasks.drawn
        outcome.state = session.state()
    outcome.wall_s = time.monotonic() - began
    return outcome


def _update(session: TrainerSession, way: kinds.Way, outcome: Outcome, worker: Worker, versions: range) -> None:
    """Take a batch, publish, wait until both engines have it, and again."""
    # Engines of a new worker have no way to a version that was broadcast before it came; the next one brings them in.
    in_order = ("ready", "loading") if outcome.cell.kind == "collective" and versions.start > 1 else ("ready",)
    _until(session, lambda engines: all(engine.state in in_order for engine in engines), worker, f"both are {in_order}")
    for version in versions:
        if version > versions.start or "loading" not in in_order:
            outcome.seen.add(next(session))
        began = time.monotonic()
        assert session.publish(way.source(version)) == version
        engines = _until(
            session,
            lambda engines, version=version: all(  # type: ignore[misc]
                engine.state == "ready" and engine.loaded.version == version for engine in engines
            ),
            worker,
            f"both have version {version}",
        )
        outcome.update_s.append(time.monotonic() - began)
        outcome.reload_ms += [engine.last_reload_ms for engine in engines]


def _until(session: TrainerSession, holds: Callable[[list[Engine]], bool], worker: Worker, what: str) -> list[Engine]:
    """Wait for something of the engines of a worker; they as they then are."""
    deadline = time.monotonic() + _UPDATE_TIMEOUT_S
    while True:
        engines = [engine for engine in session.state().engines if engine.worker_id == worker.worker_id]
        if len(engines) == ENGINES and holds(engines):
            return engines
        assert worker.process.poll() is None, f"the worker has ended while it was to be seen that {what}"
        assert time.monotonic() < deadline, f"still not: {what}; the engines are {engines}"
        time.sleep(_POLL_S)


def check_cell(outcome: Outcome) -> None:
    """No task and no token is gone without a record, and nothing went wrong on the way."""
    seen, state = outcome.seen, outcome.state
    check_tasks(seen, outcome.submitted, state)
    check_tokens(outcome.words, seen, state)
    assert state.statistics["leases_expired"] == 0
    assert state.statistics["pushes_closed"] == 0
    assert all(engine.errors == 0 for engine in state.engines), state.engines
    # The updates met work: it would prove nothing to change the weights of engines that idle.
    assert seen.spanning_samples > 0
