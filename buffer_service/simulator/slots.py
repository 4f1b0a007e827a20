"""Slots: which response each one decodes, and when it ends.

Slot time stands still while engines reload, so it lags behind the wall clock by the pauses so far; ends are kept in
slot time. Invariants: a slot is idle only when no group may be started: there is no lease, or too little room for its
responses among those in flight; of a group that was started every response gets a slot before any of the next group's.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

import numpy as np

from buffer_service.simulator.groups import SimulatedGroup
from buffer_service.simulator.workload import Jump, Workload

_GROUPS_DRAWN = 512
"""Groups whose lengths are drawn at once; a detail, but one that fixes what a seed means."""

_Drawn = tuple[list[float], int, int]
"""Durations, tokens and longest response of a group."""


class Slots:
    """The decoding side. `start` asks for a lease of the next group, and says whether there was one."""

    def __init__(
        self, workload: Workload, seed: int, start: Callable[[SimulatedGroup], bool], *, longest_first: bool = False
    ) -> None:
        self._start = start
        self._drawn = _draws(workload, seed)
        if longest_first:
            self._drawn = _longest_first(self._drawn, workload, seed)
        self._pause = workload.reload_pause
        self._ends: list[tuple[float, int, SimulatedGroup]] = []
        self._tickets = 0
        self._concurrency = self._idle = workload.concurrency
        self._current: SimulatedGroup | None = None
        self._next: _Drawn | None = None
        self._jump: Jump | None = None
        self._ready: deque[SimulatedGroup] = deque()
        """Groups that are leased and not begun."""
        self._group_size = workload.group_size + workload.surplus
        self._surplus = workload.surplus
        self.cut_tokens = 0.0
        """Tokens of surplus responses that were made and cut off."""
        self._started = 0
        room = workload.groups_in_flight * workload.group_size - self._group_size
        self._room = room if workload.groups_in_flight else inf
        """Most responses that may be left of the groups that are leased, for one more to be leased."""
        self.now = 0.0
        """Slot time of the last event."""
        self._lag = 0.0
        """Wall time - slot time."""
        self._paused_until = 0.0
        self.version = 0
        """That engines have loaded."""
        self._version_base = 0.0
        """∫ version dt up to slot time t is version * t - this."""
        self.idle_time = 0.0
        """Slots times token times in which they were idle."""
        self.busy_time = 0.0
        """Slot time in which any slot decoded."""

    def __len__(self) -> int:
        """Responses in slots."""
        return len(self._ends)

    def wall(self) -> float:
        """Wall time of the last event."""
        return self.now + self._lag

    def advance(self, until: float) -> SimulatedGroup | None:
        """Go on to the next end of a group not after `until` (wall time); None: there is none.

        The slot that ended the group is idle until `fill`.
        """
        limit = until - self._lag
        ends, version, base, current = self._ends, self.version, self._version_base, self._current
        replace, tickets, surplus = heapq.heapreplace, self._tickets, self._surplus
        while ends and ends[0][0] <= limit:
            end, ticket, group = ends[0]
            group.version_time += version * end - base
            group.left -= 1
            if surplus:
                group.longest = max(group.longest, round(group.begun.pop(ticket)[0]))
            if not group.left:
                heapq.heappop(ends)
                self._tickets = tickets
                self._pass(end)
                self._idle += 1
                if surplus:
                    self._cut(group)
                group.complete(version)
                return group
            if current is not None and current.pending:
                tickets += 1
                current.version_time -= version * end - base
                duration = current.pending.pop()
                replace(ends, (end + duration, tickets, current))
                if surplus:
                    current.begun[tickets] = duration, version * end - base
            else:
                heapq.heappop(ends)
                self._tickets = tickets
                self._pass(end)
                self._idle += 1
                self.fill()
                tickets, current = self._tickets, self._current
        self._tickets = tickets
        if limit < inf:
            self._pass(max(self.now, limit))
        return None

    def fill(self) -> None:
        """Start responses in idle slots, as far as groups may be started."""
        now, version = self.now, self.version
        stamp = version * now - self._version_base
        while self._idle:
            group = self._current
            if group is None or not group.pending:
                group = self._begin()
                if group is None:
                    return
            self._idle -= 1
            self._tickets += 1
            group.version_time -= stamp
            duration = group.pending.pop()
            heapq.heappush(self._ends, (now + duration, self._tickets, group))
            if self._surplus:
                group.begun[self._tickets] = duration, stamp
        while self._room < inf and (leased := self._lease()):
            self._ready.append(leased)

    def _cut(self, group: SimulatedGroup) -> None:
        """Take the rest of a group that is complete out of its slots."""
        own = [(end, ticket) for end, ticket, of in self._ends if of is group]
        self.cut_tokens += sum(group.begun[ticket][0] - (end - self.now) for end, ticket in own)
        self._ends[:] = [entry for entry in self._ends if entry[2] is not group]
        heapq.heapify(self._ends)
        self._idle += len(own)
        group.cut()

    def jump(self, jump: Jump) -> None:
        """Have groups that begin from now on be longer, and decoded at another speed."""
        self._jump = jump

    def load(self, version: int, wall: float) -> None:
        """Have the engines pause at wall time `wall`, in seconds, and decode with `version` from then on."""
        slot = max(self.now, wall - self._lag)
        self._pass(slot)
        self._version_base += slot * (version - self.version)
        self.version = version
        if self._pause:
            pause_ends = wall + self._pause
            self._lag += pause_ends - max(wall, self._paused_until)
            self._paused_until = pause_ends

    def _pass(self, now: float) -> None:
        passed = now - self.now
        self.idle_time += self._idle * passed
        self.busy_time += passed if self._idle < self._concurrency else 0.0
        self.now = now

    def _begin(self) -> SimulatedGroup | None:
        """The next group, if there is one or it may be leased."""
        group = self._ready.popleft() if self._ready else self._lease()
        if group is not None:
            group.begin(self.version)
            self._current = group
        return group

    def _lease(self) -> SimulatedGroup | None:
        """Another group, if it may be leased; lengths that were drawn for nothing wait for the next."""
        pending = len(self._current.pending) if self._current is not None else 0
        if len(self._ends) + pending + len(self._ready) * self._group_size > self._room:
            return None
        durations, tokens, longest = self._next or self._draw()
        longest = 0 if self._surplus else longest
        group = SimulatedGroup(self._started, self.version, durations, tokens, longest, surplus=self._surplus)
        if not self._start(group):
            self._next = (durations, tokens, longest)
            return None
        self._next = None
        self._started += 1
        return group

    def _draw(self) -> _Drawn:
        durations, tokens, longest = next(self._drawn)
        if self._jump is None:
            return durations, tokens, longest
        longer = self._jump.length
        return [each * longer / self._jump.speed for each in durations], round(tokens * longer), round(longest * longer)


def _draws(workload: Workload, seed: int) -> Iterator[_Drawn]:
    rng = np.random.default_rng(seed)
    while True:
        lengths = workload.lengths.draw(rng, _GROUPS_DRAWN, workload.group_size + workload.surplus)
        durations = workload.durations(lengths).tolist()
        yield from zip(durations, lengths.sum(axis=1).tolist(), lengths.max(axis=1).tolist(), strict=True)


def _longest_first(drawn: Iterator[_Drawn], workload: Workload, seed: int) -> Iterator[_Drawn]:
    """Order groups that are submitted together by their longest expected response, the longest first."""
    rng = np.random.default_rng((seed, 1))
    count = workload.submitted_together
    while True:
        together = list(islice(drawn, count))
        expected = np.log([longest for *_, longest in together]) + rng.normal(0, workload.estimate_error, count)
        yield from (together[index] for index in np.argsort(-expected, kind="stable"))
