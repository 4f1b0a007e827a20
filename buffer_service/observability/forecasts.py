"""Simulations of live runs, made beside the process: nobody waits for one, and they take a bounded share of a core.

A run that is looked at asks. What is known is answered at once: the same question's answer, else the run's last one
under the same policy. A thread has a child of low priority simulate what is missing, one after another, and then rests
RESTS times as long. So all runs together take at most a sixth of one core, in each process that is asked.
"""

import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog

from buffer_service.domain.ops import RunView
from buffer_service.observability.estimate import Estimate, estimate
from buffer_service.observability.estimate.questions import Played, Question, is_near

RESTS = 5
"""Times as long as a child took, that the next one has to wait."""
MOST_KEPT = 1_024
"""Answers, and runs, that are kept; the oldest go."""
MOST_AT_ONCE = 8
"""Questions of a child. Of more that wait, the newest go first."""
TIMEOUT_S = 60.0
"""Time after which a child is given up."""
IDLE_S = 10.0
"""Time without questions after which the thread ends."""

_COMMAND = (sys.executable, "-m", "buffer_service.observability.estimate")

Answers = Sequence[Played | None]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

log = structlog.get_logger(__name__)


def in_a_child(asked: Sequence[Question]) -> Answers:
    """Answers of a process of its own, one for each question.

    Raises OSError, SubprocessError or ValueError where it fails.
    """
    lines = "".join(f"{one.to_json()}\n" for one in asked)
    done = subprocess.run(  # noqa: S603 - this program
        _COMMAND, input=lines, capture_output=True, timeout=TIMEOUT_S, check=True, text=True
    )
    return [Played.from_json(line) if line else None for line in done.stdout.splitlines()]


class Forecasts:
    """Simulations that were asked for. Thread-safe."""

    def __init__(
        self,
        simulate: Callable[[Sequence[Question]], Answers] = in_a_child,
        *,
        clock: Callable[[], float] = time.monotonic,
        rests: float = RESTS,
    ) -> None:
        self._simulate = simulate
        self._clock = clock
        self._rests = rests
        self._changed = threading.Condition()
        self._answers: OrderedDict[Question, Played | None] = OrderedDict()
        self._of_run: OrderedDict[str, tuple[Question, Played | None]] = OrderedDict()
        self._waiting: OrderedDict[str, Question] = OrderedDict()
        """The newest question of each run, the one that was asked last at the end."""
        self._under_way: dict[str, Question] = {}
        self._thread: threading.Thread | None = None

    def estimate(self, view: RunView) -> Estimate:
        """Estimate of a run, with its simulation as far as there is one."""
        return estimate(view, self.play)

    def play(self, run_id: str, asked: Question) -> tuple[Played | None, bool]:
        """The run's simulation, and whether one is on its way that may differ."""
        with self._changed:
            if asked in self._answers:
                self._answers.move_to_end(asked)
                self._waiting.pop(run_id, None)
                _keep(self._of_run, run_id, (asked, self._answers[asked]))
                return self._answers[asked], False
            if self._under_way.get(run_id) != asked:
                self._ask(run_id, asked)
            last = self._of_run.get(run_id)
            if last is None or last[0].policy != asked.policy:
                return None, True
            return last[1], not is_near(last[0], asked)

    def _ask(self, run_id: str, asked: Question) -> None:
        _keep(self._waiting, run_id, asked)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="forecasts", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while asked := self._next():
            began = self._clock()
            try:
                answers = self._simulate(list(asked.values()))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                log.warning("no simulation of runs", runs=sorted(asked), why=str(error))
                answers = [None] * len(asked)
            with self._changed:
                self._under_way = {}
                for (run_id, question), found in zip(asked.items(), answers, strict=True):
                    _keep(self._answers, question, found)
                    _keep(self._of_run, run_id, (question, found))
            time.sleep(self._rests * (self._clock() - began))

    def _next(self) -> dict[str, Question]:
        """Questions for a child, taken out of those that wait; none when there were none for a while."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                self._thread = None
                return {}
            self._under_way = dict(self._waiting.popitem() for _ in range(min(MOST_AT_ONCE, len(self._waiting))))
            return self._under_way


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_KEPT:
        kept.popitem(last=False)


FORECASTS = Forecasts()
"""Those of this process: one thread, and one child at a time, whoever in it looks at runs."""
