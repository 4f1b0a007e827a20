"""The buffer's rules on as little state as a simulation needs: counts, and an index of what is queued.

Decisions are those of the domain's functions: `capacity` and `too_stale` at a lease, `within_caps` and the oldest group
at a push, `aged_out` and the order's first group at a pull. What is left out cannot happen in a simulation: leases that
expire, repeats, other ranks, resumes. Tests compare every decision with the reference model.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import assert_never, cast

from buffer_service.domain.admission import NO_OPEN_STEP, OpenStep, capacity
from buffer_service.domain.gate import aged_out, too_stale
from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import UNSET, Order, RunPolicy, StaleAction
from buffer_service.domain.quota import within_caps
from buffer_service.domain.steering.knobs import Knobs, in_effect, lookahead_milli
from buffer_service.domain.timeline import next_train_version
from buffer_service.simulator.buffer import DROPS, Losses
from buffer_service.simulator.groups import SimulatedGroup
from buffer_service.simulator.queue import Queue

_Task = tuple[int, int]
"""Number of a task, in order of submission, and its incarnation."""


class CompactBuffer:
    """A Buffer."""

    def __init__(self, policy: RunPolicy) -> None:
        self._stated = self._policy = policy
        """Policy as it was stated, and as it is in effect."""
        self._lookahead_milli = UNSET
        self.held_at = UNSET
        self._drops = DROPS[policy.overflow_action]
        self._queue = Queue(policy.order, policy.staleness_measure)
        self._line: deque[SimulatedGroup] = deque()
        self._tasks = 0
        self._again: list[_Task] = []
        """Recycled tasks, which are leased before new ones; lowest number first."""
        self._leased = 0
        self._heads: Counter[int] = Counter()
        """Leased groups by the version that their engine had."""
        self._turns: dict[int, None] = {}
        """Numbers of leased groups, the first one first, and the last that was given; in the order of submission."""
        self._last_turn = 0
        self._published = 0
        self._next_step = 0
        self._published_steps = 0
        self._in_step = 0
        """Groups of the open step."""
        self._micro_batch = policy.micro_batch_groups
        """Groups of its micro-batches; 0: it is whole."""
        self._overflow = self._stale = self._recycled = self._lost_tokens = 0

    def lease(self, group: SimulatedGroup) -> bool:
        """Lease the group a task, recycled ones first. False, and no lease, if it is too stale or there is no room."""
        policy = self._policy
        unpublished = self._next_step - self._published_steps
        train_version = next_train_version(self._published, unpublished, policy.batches_per_publish)
        if too_stale(policy, train_version=train_version, head_version=group.head):
            return False
        room = capacity(
            policy,
            unpublished_steps=unpublished,
            open_step=OpenStep(policy.batch_groups, self._in_step) if self._in_step else NO_OPEN_STEP,
            queued=len(self._queue),
            leased=self._leased,
            behind=self._published - group.head,
            lookahead_milli=self._lookahead_milli,
        )
        if room is not None and room <= 0:
            self._note_held(unpublished)
            return False
        if self._again:
            group.lease = task = heapq.heappop(self._again)
            group.incarnation = task[1]
        else:
            self._tasks += 1
            group.lease = (self._tasks, 0)
        self._leased += 1
        self._heads[group.loaded] += 1
        if policy.order is Order.SUBMISSION:
            self._last_turn += 1
            group.sequence = self._last_turn
            self._turns[group.sequence] = None
        return True

    def _note_held(self, unpublished: int) -> None:
        """Note that what a controller lowered holds an engine back, where the policy as stated would not."""
        if self._policy is self._stated or self.held_at == self._published:
            return
        room = capacity(
            self._stated,
            unpublished_steps=unpublished,
            open_step=OpenStep(self._policy.batch_groups, self._in_step) if self._in_step else NO_OPEN_STEP,
            queued=len(self._queue),
            leased=self._leased,
        )
        if room is None or room > 0:
            self.held_at = self._published

    def push(self, group: SimulatedGroup) -> bool:
        """Queue the complete group; False if it waits in line."""
        if self._drops is None:
            if self._line or not self._has_room():
                self._line.append(group)
                return False
        else:
            while not self._has_room():
                dropped = self._drops(self._queue)
                self._queue.remove(dropped)
                self._overflow += 1
                self._lost_tokens += dropped.tokens
        self._accept(group)
        return True

    def retry(self) -> int:
        """Queue what waits in line; how many wait still."""
        while self._line and self._has_room():
            self._accept(self._line.popleft())
        return len(self._line)

    def pull(self, step: int, number: int, train_version: int) -> tuple[Sequence[SimulatedGroup], bool] | None:  # noqa: ARG002
        """A micro-batch of a step, and whether it is the last."""
        policy = self._policy
        if policy.max_staleness != UNSET:
            self._evict(train_version)
        wanted = policy.batch_groups - self._in_step
        if not self._in_step:
            self._micro_batch = policy.micro_batch_groups
        if self._micro_batch:
            wanted = min(wanted, self._micro_batch)
        if len(self._queue) < wanted:
            return None
        if policy.order_window_groups and self._turns:
            end = next(iter(self._turns)) + policy.order_window_groups
            if self._queue.count_below(end) < wanted:
                return None
        last = self._in_step + wanted == policy.batch_groups
        chance = self._last_chance(train_version)
        if chance is not None and last and any(self._heads[head] for head in range(*chance)):
            return None
        taken = self._queue.take(wanted, chance[1] if chance else None)
        self._in_step += wanted
        if last:
            self._in_step = 0
            self._next_step += 1
        return taken, last

    def _last_chance(self, train_version: int) -> tuple[int, int] | None:
        """Heads that this step may still train, and the next may not: from, and below; None where no batch waits.

        A batch of the simulation waits for as long as it takes.
        """
        policy = self._policy
        if policy.stale_action is not StaleAction.WAIT:
            return None
        steps = self._next_step + 1 - self._published_steps
        following = next_train_version(self._published, steps, policy.batches_per_publish)
        return train_version - policy.max_staleness, max(train_version, following) - policy.max_staleness

    def finish(self, step: int, version: int | None) -> None:
        """A step is trained, and perhaps published."""
        if version is not None:
            self._published = version
            self._published_steps = step + 1

    def steer(self, knobs: Knobs) -> None:
        """Have these knobs in effect from now on."""
        self._policy = in_effect(self._stated, knobs, 1)
        self._lookahead_milli = lookahead_milli(self._stated, knobs)

    def losses(self) -> Losses:
        """Losses so far."""
        return Losses(self._overflow, self._stale, self._recycled, self._lost_tokens)

    def _has_room(self) -> bool:
        return within_caps(self._policy, Amount(groups=len(self._queue) + 1))

    def _accept(self, group: SimulatedGroup) -> None:
        self._leased -= 1
        self._heads[group.loaded] -= 1
        self._turns.pop(group.sequence, None)
        self._queue.add(group)

    def _evict(self, train_version: int) -> None:
        policy = self._policy
        measure = policy.staleness_measure
        while len(self._queue):
            group = self._queue.stalest()
            if not aged_out(policy, train_version=train_version, age_milli=group.age_milli(measure)):
                return
            self._queue.remove(group)
            self._lost_tokens += group.tokens
            number, incarnation = cast("_Task", group.lease)
            exhausted = 0 < policy.max_incarnations <= incarnation + 1
            match policy.stale_action:
                case StaleAction.RECYCLE | StaleAction.WAIT if not exhausted:
                    heapq.heappush(self._again, (number, incarnation + 1))
                    self._recycled += 1
                case StaleAction.RECYCLE | StaleAction.WAIT | StaleAction.DROP:
                    self._stale += 1
                case _:
                    assert_never(policy.stale_action)
