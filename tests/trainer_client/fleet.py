"""Workers and engines of a run that follow collective plans, and the client that a publisher sees them through.

Each engine's worker is a thread; its engine is a process of its own (`tests.trainer_client.receiver`), so that it can
be killed. What the workers do is what the protocol says of workers, in as few lines as possible.
"""

import contextlib
import itertools
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from trainer_client import BufferClient, Publication, WeightVersion
from trainer_client.publish.collective.plan import CollectivePlan
from trainer_client.state import Engine, RunState

START_S = 60.0
_VERSIONS = itertools.count(1)
"""Never the same twice: engines outlive the fleets of single tests."""
_ROOT = Path(__file__).parents[2]


class EngineGone(Exception):
    """The engine's process has ended."""


class EngineProcess:
    """A receiver in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_client.receiver"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
        )  # fmt: skip
        self._answer()

    def call(self, what: str, **arguments: object) -> dict[str, float]:
        """Raises EngineGone, RuntimeError for what went wrong inside."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([what, arguments]) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise EngineGone("the engine does not answer") from None
        return cast("dict[str, float]", self._answer().get("ok", {}))

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineGone("the engine does not answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


class FleetEngine:
    """One engine with its worker. `on_phase` may be set to interfere: called with the phase before it is followed."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.engine = EngineProcess()
        self.on_phase: Callable[[str], None] = lambda _: None
        self.state = "ready"
        self._received: list[dict[str, float]] = []
        self.takes_buckets = True
        self.mute = False
        """True for a worker that is gone."""
        self.report: dict[str, Any] = {"membership": 0, "prepared": None, "errors": 0, "last_error": ""}
        self.loaded = WeightVersion(1, 0)
        self.reported_at = time.monotonic()
        self._plans: queue.SimpleQueue[CollectivePlan | threading.Event | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def see(self, plan: CollectivePlan) -> None:
        """A plan from the watch."""
        self._plans.put(plan)

    @property
    def received(self) -> list[dict[str, float]]:
        """Sums of the tensors of each update, once the worker has followed every plan that it was shown.

        The publisher is done when everything is sent, which is a moment before the worker has it.
        """
        self.settle()
        return self._received

    def settle(self) -> None:
        """Waits until the worker has followed every plan that it was shown."""
        followed = threading.Event()
        self._plans.put(followed)
        assert followed.wait(START_S), f"the worker of {self.engine_id} does not come to an end"

    def view(self) -> Engine:
        """View as the run shows it."""
        silent_ms = round((time.monotonic() - self.reported_at) * 1000)
        said = {**self._shown(), "takes_buckets": self.takes_buckets, "silent_ms": silent_ms}
        return Engine(self.engine_id, "w", self.state, self.loaded, 0, 0, **said)

    def _shown(self) -> dict[str, Any]:
        return dict(self.report)

    def restart(self) -> None:
        """A new engine process, after the old one was killed; it belongs to no group."""
        self.engine.close()
        self.engine = EngineProcess()
        self._say(membership=0, prepared=None)

    def close(self) -> None:
        self.engine.close()
        self._plans.put(None)
        self._worker.join(10)

    def _say(self, **changes: Any) -> None:
        self.report = {**self.report, **changes}
        self.reported_at = time.monotonic()

    def _work(self) -> None:
        while (plan := self._plans.get()) is not None:
            if isinstance(plan, threading.Event):
                plan.set()
                continue
            if self.mute:
                continue
            rank = next((m.rank for m in plan.members if m.engine_id == self.engine_id), None)
            try:
                if rank is None or plan.phase == "abandoned":
                    self._say(prepared=None)
                    continue
                self.on_phase(plan.phase)
                self._follow(plan, rank)
            except (EngineGone, RuntimeError) as error:
                if not self.mute:
                    errors = self.report["errors"] + 1
                    self._say(membership=0, prepared=None, errors=errors, last_error=str(error))

    def _follow(self, plan: CollectivePlan, rank: int) -> None:
        if plan.phase == "prepare":
            if self.report["membership"] != plan.membership:
                self.engine.call("leave")
                self.engine.call(
                    "join",
                    host=plan.master_address,
                    port=plan.master_port,
                    name=plan.group_name,
                    rank=rank,
                    world_size=plan.world_size,
                )
            self._say(membership=plan.membership, prepared=plan.version)
            return
        specs = [(spec.name, spec.dtype, spec.shape) for spec in plan.tensors]
        self._received.append(self.engine.call("receive", tensors=specs, buckets=plan.bucket_tensors))
        self.loaded = plan.version
        self._say(prepared=None)


class Fleet:
    """Fleet: what a publisher sees of the run: `run` and `plan_collective` of a client."""

    target = "the fleet"

    def __init__(self, *engines: FleetEngine) -> None:
        self.engines = list(engines)
        self.plans: list[CollectivePlan] = []

    def run(self, run_id: str, *, timeout_s: float | None = None) -> RunState:
        class Seen:
            engines = tuple(engine.view() for engine in self.engines)

        return cast("RunState", Seen)

    def plan_collective(self, run_id: str, *, term: int, plan: CollectivePlan, timeout_s: float | None = None) -> None:
        self.plans.append(plan)
        for engine in self.engines:
            engine.see(plan)

    def publication(self, **changes: Any) -> Publication:
        """The next version's."""
        return Publication(cast("BufferClient", self), "r", 1, next(_VERSIONS), **changes)

    def phases(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """(phase, membership, members) of every plan so far."""
        return [(p.phase, p.membership, tuple(m.engine_id for m in p.members)) for p in self.plans]


@contextlib.contextmanager
def fleet_of(*names: str) -> Iterator[Fleet]:
    """Engines of these names, started side by side."""
    with contextlib.ExitStack() as stack:
        started: queue.SimpleQueue[FleetEngine] = queue.SimpleQueue()
        threads = [threading.Thread(target=lambda name=name: started.put(FleetEngine(name))) for name in names]
        for thread in threads:
            thread.start()
        engines = [started.get(timeout=START_S) for _ in names]
        for engine in engines:
            stack.callback(engine.close)
        yield Fleet(*sorted(engines, key=lambda engine: engine.engine_id))
