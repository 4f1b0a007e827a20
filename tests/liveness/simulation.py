"""A run in virtual time on the reference model: a feeder, workers of every kind of trouble, a trainer. Seeded.

Whoever finds nothing to do looks again a little later, so nothing here depends on notifications. Invariant: everything
follows from the situation and its seed.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import PendingFull
from tests.oracle import ReferenceModel

RUN = "run"
JANITOR_MS = 250
TASKS_AT_ONCE = 8
OPERATIONS_BETWEEN_CHECKS = 40


@dataclass(frozen=True)
class Habits:
    """Ways in which the trainer uses the service; `policy.prefetch_batches` and `batches_per_publish`
    are part of it.
    """

    world_size: int = 1
    publishing: str = "with commit"
    """Or `commit first`: every step is committed by itself; or `publish first`, and the commit follows."""
    own_sizes: bool = False
    """It asks for another number of groups with each step."""
    crashes: int = 0
    """So often it dies after some time, and another one resumes."""
    gives_back: bool = False
    """It gives groups of every other step back before it trains, and waits for others."""


@dataclass
class Stuck(Exception):
    """The trainer did not get its batches."""

    why: str
    view: ops.RunView

    def __str__(self) -> str:
        groups = {name: amount.groups for name, amount in self.view.groups.items() if amount.groups}
        return f"{self.why}; groups {groups}, tasks {self.view.tasks}, {self.view.statistics}, {self.view.policy}"


@dataclass
class Simulation:
    """State that all parties share: the run, the clock, chance."""

    policy: RunPolicy
    habits: Habits
    seed: int
    environments: tuple[str, ...] = ("math",)
    now: int = 1_000_000
    term: int = 1
    rates: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.model = ReferenceModel(lambda: self.now)
        self.model.create_run(RUN, self.policy)
        self.state = self.model._runs[RUN]
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._cursor = 0
        self._requests = 0
        self.at(JANITOR_MS, self._janitor)

    def at(self, delay_ms: int, happen: Callable[[], None]) -> None:
        """Let something happen after a delay."""
        self._order += 1
        heapq.heappush(self._events, (self.now + max(1, delay_ms), self._order, happen))

    def run(self, finished: Callable[[], bool], limit_ms: int) -> None:
        """Go on until it is finished. Raises Stuck after limit_ms of virtual time."""
        began = self.now
        count = 0
        while not finished():
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            count += 1
            if count % OPERATIONS_BETWEEN_CHECKS == 0:
                self.model.check_invariants(RUN)
            if self.now - began > limit_ms:
                raise Stuck(f"not finished after {limit_ms / 1_000:.0f} s", self.model.view(RUN))
        self.model.check_invariants(RUN)

    def request_id(self) -> str:
        """A new one."""
        self._requests += 1
        return f"request-{self._requests}"

    def feed(self) -> None:
        """The feeder keeps some tasks pending."""
        if len(self.state.pending) >= TASKS_AT_ONCE:
            return
        tasks = [
            ops.NewTask(f"task-{self._cursor + i}", 2, self.random.randrange(3), self._environment(i), b"", i % 3)
            for i in range(TASKS_AT_ONCE)
        ]
        cursor = self._cursor + len(tasks)
        request = ops.Submit(self.term, self.request_id(), self._cursor, cursor, b"", tasks)
        try:
            self.model.submit(RUN, request)
        except PendingFull:
            return
        self._cursor = cursor

    def _environment(self, i: int) -> str:
        return self.environments[(self._cursor + i) % len(self.environments)]

    def _janitor(self) -> None:
        self.model.expire(RUN)
        self.at(JANITOR_MS, self._janitor)
