"""Steering in a simulation: what the store counts from publish to publish, and the controller's decision after each.

Times are token times, taken for milliseconds.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.decisions import NO_DECISION, Decision, Situation
from buffer_service.domain.window import Snapshot
from buffer_service.rules.totals import TOTALS, WINDOW_VERSIONS
from buffer_service.simulator.buffer import Buffer
from buffer_service.simulator.groups import SimulatedGroup

Controller: TypeAlias = Callable[[Situation], Decision]


class Steering:
    """Totals of a simulated run, and the knobs in effect."""

    def __init__(self, policy: RunPolicy, controller: Controller, buffer: Buffer) -> None:
        self._policy = policy
        self._controller = controller
        self._buffer = buffer
        self._totals = dict.fromkeys(TOTALS, 0)
        self._snapshots: deque[Snapshot] = deque(maxlen=WINDOW_VERSIONS + 1)
        self._begun: dict[int, float] = {}
        self._decided = NO_DECISION

    def leased(self, group: SimulatedGroup, wall: float) -> None:
        """A group is begun."""
        self._begun[group.number] = wall

    def pushed(self, group: SimulatedGroup, wall: float) -> None:
        """A group is complete; time that it waits in line is not counted."""
        totals = self._totals
        totals["accepted_groups"] += 1
        totals["generated_groups"] += 1
        totals["generation_ms"] += round(wall - self._begun.pop(group.number))

    def taken(self, group: SimulatedGroup, train_version: int) -> None:
        """A group is to be trained by that version."""
        totals = self._totals
        totals["assembled_groups"] += 1
        totals["assembled_response_tokens"] += group.tokens
        totals["staleness_sum"] += train_version - group.head
        totals["pre_queue_staleness_sum"] += group.tail - group.head
        totals["in_queue_staleness_sum"] += train_version - group.tail
        token = train_version - group.version_time / group.total_duration
        totals["token_staleness_milli_sum"] += round(1_000 * group.tokens * token)

    def published(self, version: int, wall: float, idle: float) -> None:
        """A version is published; `idle`: time in which the trainer has waited so far."""
        self._totals |= {"trainer_busy_ms": round(wall - idle), "trainer_wait_ms": round(idle)}
        self._snapshots.append(Snapshot(round(wall), version, dict(self._totals)))
        self._decided = self._controller(
            Situation(
                policy=self._policy,
                world_size=1,
                version=version,
                decided=self._decided,
                snapshots=self._snapshots,
                held_at=self._buffer.held_at,
            )
        )
        self._buffer.steer(self._decided.knobs)
