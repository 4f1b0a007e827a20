"""A trainer that never stops publishing, in a thread, and what an observer sees of the run meanwhile.

The trainer takes batch after batch and publishes after each, so that updates are nearly always under way. The observer
has a client of its own, and waits out a service that is away.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from buffer_wire.errors import RolloutBufferError
from tests.engine_matrix import kinds
from tests.engine_matrix.cell import Load, Tasks, policy
from tests.engine_matrix.truth import Seen
from trainer_client import BufferClient, ClientOptions, SessionOptions
from trainer_client.state import Engine, RunState

RUN = "r"
POLL_S = 0.01
WITHIN_S = 300.0
"""Time for everything that is waited for: a restarted SGLang server on a busy machine takes minutes."""


class Trainer:
    """Trains in a thread from `with` on; `finish` ends the tasks and waits until every one was delivered."""

    def __init__(self, address: str, folder: Path, load: Load) -> None:
        self.seen = Seen()
        self.tasks = Tasks(load)
        self.version = 0
        """Published last."""
        self._address = address
        self._folder = folder
        self._publishing = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)

    def _run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - told by `finish`
            self._failure = error

    def _train(self) -> None:
        options = SessionOptions(pull_timeout_s=2 * WITHIN_S, max_pending_tasks=16, chunk_tasks=4)
        with (
            BufferClient(self._address, ClientOptions(timeout_s=WITHIN_S)) as client,
            kinds.way("path", self._folder, 0) as way,
            client.session(RUN, policy=policy(), tasks=self.tasks, publisher=way.publisher, options=options) as session,
        ):
            for batch in session:
                self.seen.add(batch)
                if self._publishing:
                    self.version = session.publish(way.source(session.version + 1))
                session.checkpoint()

    def finish(self) -> None:
        """No more tasks and versions; returns when everything was delivered."""
        self._publishing = False
        self.tasks.stop()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), "the trainer does not get to its end"
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Raise what ended the trainer before its time."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publishing = False
        self.tasks.stop()


class Observer:
    """Looks at the run until something holds."""

    def __init__(self, address: str, trainer: Trainer) -> None:
        self._client = BufferClient(address, ClientOptions(timeout_s=0.25))
        self._trainer = trainer

    def close(self) -> None:
        self._client.close()

    def now(self) -> RunState | None:
        """The run; None while nobody answers."""
        self._trainer.check()
        try:
            return self._client.run(RUN)
        except RolloutBufferError:
            return None

    def until(self, holds: Callable[[RunState], bool], what: str) -> tuple[RunState, float]:
        """The first state that it holds for, and the monotonic time at which it was seen."""
        deadline = time.monotonic() + WITHIN_S
        seen: RunState | None = None
        while True:
            state = self.now()
            if state is not None and holds(state):
                return state, time.monotonic()
            seen = state or seen
            assert time.monotonic() < deadline, f"still not: {what}; engines: {seen and seen.engines}"
            time.sleep(POLL_S)


def fit(engines: Sequence[Engine], version: int, count: int) -> bool:
    """True when all of `count` engines are ready with this version or a newer one."""
    return len(engines) == count and all(e.state == "ready" and e.loaded.version >= version for e in engines)


def engine_of(state: RunState, engine_id: str) -> Engine:
    """One engine of a run."""
    return next(engine for engine in state.engines if engine.engine_id == engine_id)
