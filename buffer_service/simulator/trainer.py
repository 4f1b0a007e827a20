"""The trainer: pulls a batch, or its next micro-batch, when it is free, and publishes when a step is trained.

With prefetch it pulls up to so many steps ahead of the one that it trains on, as the trainer client does: whole
batches, or their micro-batches as soon as these are there. A step takes B·L̄/T whatever its batch holds; a micro-batch
its share of that.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from operator import attrgetter

from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator.buffer import Buffer
from buffer_service.simulator.groups import SimulatedGroup

Taken = Callable[[SimulatedGroup, int, int], None]
"""Told of every group that is pulled: the group, its step, its train_version."""


_number = attrgetter("number")


class Trainer:
    """The training side."""

    def __init__(self, policy: RunPolicy, step_time: float, buffer: Buffer, taken: Taken) -> None:
        self._policy = policy
        self._step_time = step_time
        self._buffer = buffer
        self._taken = taken
        self._ahead: deque[tuple[int, int, bool]] = deque()
        """Pulled and not begun: step, groups, and whether they end their step."""
        self._begun_step = -1
        """The newest step of which a part was begun."""
        self._step = 0
        self._micro_batch = 0
        """Micro-batch of the next pull."""
        self._ends_step = False
        """True if the groups that it trains on now end their step."""
        self.trained_steps = 0
        self.version = 0
        self.done_at = inf
        """Wall time at which it is free again; inf while it waits for groups."""
        self.idle_time = 0.0
        self._idle_since = 0.0

    def jump(self, length: float) -> None:
        """Have training take longer from now on, as responses are."""
        self._step_time *= length

    def pull(self, wall: float) -> bool:
        """Pull what may be pulled at that time; whether anything was."""
        pulled = False
        while self.done_at == inf or self._pulls_ahead():
            if self.done_at == inf and self._ahead:
                self._begin(wall)
                continue
            train_version = self._step // self._policy.batches_per_publish
            got = self._buffer.pull(self._step, self._micro_batch, train_version)
            if got is None:
                break
            groups, last = got
            for group in sorted(groups, key=_number):
                self._taken(group, self._step, train_version)
            self._ahead.append((self._step, len(groups), last))
            self._step, self._micro_batch = (self._step + 1, 0) if last else (self._step, self._micro_batch + 1)
            pulled = True
        if self.done_at == inf and self._ahead:
            self._begin(wall)
        return pulled

    def finish(self) -> bool:
        """The present training is done; whether new weights were published with it."""
        self._idle_since = self.done_at
        self.done_at = inf
        if not self._ends_step:
            return False
        step = self.trained_steps
        self.trained_steps += 1
        published = self.trained_steps % self._policy.batches_per_publish == 0
        self.version += published
        self._buffer.finish(step, self.version if published else None)
        return published

    def _pulls_ahead(self) -> bool:
        ahead = self._policy.prefetch_batches
        return ahead > 0 and self._step <= self._begun_step + ahead

    def _begin(self, wall: float) -> None:
        self._begun_step, groups, self._ends_step = self._ahead.popleft()
        self.idle_time += wall - self._idle_since
        self.done_at = wall + self._step_time * groups / self._policy.batch_groups
