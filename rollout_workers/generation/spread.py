"""Samples of a group over several engines of a worker: begun on an idle one, or resumed there when they are the last.

A move aborts the samples where they run, with their tokens kept, and goes on elsewhere from prompt and tokens. It goes
only to an engine that has no work of its own and weights at least as new. It has to be expected to save a large share
of what is left. Invariants: a sample is moved at most MOST_MOVES times under a lease; versions within a sample do not
fall; what a task asks for, the other engine can do.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import fsum

import structlog

from buffer_wire.errors import InvalidField
from rollout_workers.counters import Counters
from rollout_workers.engine.errors import EngineError
from rollout_workers.engine.types import SampleRequest
from rollout_workers.generation.expectations import Lengths, Paces
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.slot import EngineSlot

POLL_S = 0.5
"""Time between two polls for samples that another engine could end sooner."""
IDLE_S = 1.0
"""Time for which an engine has had nothing to do when it is idle: until then its own leases may be on their way."""
LEAST_SHARE = 0.25
"""Least gain of a move, as a share of the time that is expected to be left."""
LEAST_S = 1.0
"""Least gain of a move, in seconds."""
CONTEXT_PACE = 0.1
"""Time to compute a token of context anew, over that to decode one; cautious: engines are several times faster."""
CALL_S = 0.2
"""Time of an abort and another call."""
MOST_MOVES = 3
"""Times that a sample may be moved under a lease."""
TAIL = 4
"""Part of a group that its last samples are: a quarter of it, one at least."""

_log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class Part:
    """Samples of a group that are under way in one engine call."""

    progress: GroupProgress
    slot: EngineSlot
    requests: Sequence[SampleRequest]
    is_guest: bool
    """True on an engine that does not hold the lease."""
    may_move: bool
    began_at: float = 0.0
    """Monotonic time at which the call began."""
    decoded_s: float = 0.0
    """Time of decoding of all requests on the engine until then."""
    ends: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Both when samples ended while others went on, by index."""
    target: EngineSlot | None = None
    """Engine on which the samples are to go on."""

    @property
    def open(self) -> list[SampleRequest]:
        """Requests that have not ended."""
        return [request for request in self.requests if request.sample_index not in self.ends]

    @property
    def share(self) -> float:
        """Share of the group that still runs here."""
        return len(self.open) / self.progress.task.group_size

    def ended(self, index: int) -> None:
        """Note that a sample has ended while others go on."""
        self.ends[index] = time.monotonic(), self.slot.decoding.request_s()


class Spread:
    """Spreads groups over `slots`, all engines of the worker."""

    def __init__(self, slots: Sequence[EngineSlot], counters: Counters) -> None:
        self._slots = slots
        self._counters = counters
        self._parts: set[Part] = set()
        self.lengths = Lengths()
        self.paces = Paces()
        self._idle_since: dict[EngineSlot, float] = {}
        """Monotonic time since when an engine has had nothing of its own to do, of those that have not."""

    def guests(self, slot: EngineSlot) -> float:
        """Groups of other engines' leases that run on this one, each by the share of its samples that do."""
        return fsum(part.share for part in self._parts if part.is_guest and part.slot is slot)

    async def run(self) -> None:
        """Move last samples to idle engines until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            idle = [slot for slot in self._slots if self._has_nothing(slot)]
            self._idle_since = {slot: self._idle_since.get(slot, now) for slot in idle}
            for slot in idle:
                if self._is_free(slot) and (part := self._best_for(slot)) is not None:
                    await self._move(part, slot)

    @contextmanager
    def under_way(self, part: Part) -> Iterator[None]:
        """Have a call under way; at its end what it says of lengths and paces is noted."""
        part.began_at = time.monotonic()
        part.decoded_s = part.slot.decoding.request_s()
        before = {request.sample_index: len(part.progress.samples[request.sample_index]) for request in part.requests}
        self._parts.add(part)
        try:
            yield
        finally:
            self._parts.discard(part)
            part.slot.room.notify()
            self._learn(part, before)

    def elsewhere(
        self, progress: GroupProgress, home: EngineSlot, requests: Sequence[SampleRequest]
    ) -> EngineSlot | None:
        """An idle engine on which half of these new samples end sooner than all do at `home`; None: there is none."""
        count, rest = len(requests), self.lengths.rest(0.0)
        # Where all are idle, all are about to get work: as at the begin of a step.
        if rest is None or home in self._idle_since:
            return None
        for slot in self._slots:
            if slot is home or not self._is_free(slot) or not _can_take(slot, progress, home, requests[0]):
                continue
            here, there = home.in_flight + count, slot.in_flight + count // 2
            if self._gain_s(rest, len(requests[0].input_ids), here, there) is not None:
                # Those that begin in the same moment go elsewhere, or stay.
                self._idle_since.pop(slot, None)
                return slot
        return None

    def _is_free(self, slot: EngineSlot) -> bool:
        """True for an engine that works and has had nothing of its own to do for a while."""
        idle_since = self._idle_since.get(slot)
        idle = idle_since is not None and time.monotonic() - idle_since >= IDLE_S
        return idle and self._has_nothing(slot) and slot.leasable and not slot.loading

    def _has_nothing(self, slot: EngineSlot) -> bool:
        guests = sum(len(part.open) for part in self._parts if part.is_guest and part.slot is slot)
        return slot.in_flight <= guests and not slot.load.of_others

    def _best_for(self, slot: EngineSlot) -> Part | None:
        """The last samples of a group that gain most on `slot`; None: none gain enough."""
        best: tuple[float, Part] | None = None
        for part in self._parts:
            count = len(part.open)
            if part.slot is slot or not part.may_move or part.target is not None or not count:
                continue
            few = count <= max(part.progress.task.group_size // TAIL, 1)
            if not few or not _can_take(slot, part.progress, part.slot, part.open[0]):
                continue
            gain_s = self._gain_of(part, slot.in_flight + count)
            if gain_s is not None and (best is None or gain_s > best[0]):
                best = gain_s, part
        return None if best is None else best[1]

    def _gain_of(self, part: Part, there: int) -> float | None:
        pace = self.paces.at(part.slot.in_flight)
        if pace is None:
            return None
        made = (time.monotonic() - part.began_at) / pace
        begun = max(len(part.progress.samples[request.sample_index]) for request in part.open)
        most = max(request.max_new_tokens for request in part.open)
        rest = self.lengths.rest(begun + made)
        context = max(len(request.input_ids) for request in part.open) + made
        if rest is None:
            return None
        return self._gain_s(min(rest, max(most - made, 0)), context, part.slot.in_flight, there)

    def _gain_s(self, rest: float, context: float, here: int, there: int) -> float | None:
        """Seconds by which `rest` tokens end sooner where `there` requests are; None where it is not worth a move."""
        slow, fast = self.paces.at(here), self.paces.at(there)
        if slow is None or fast is None:
            return None
        gain_s = rest * (slow - fast) - context * CONTEXT_PACE * fast - CALL_S
        return gain_s if gain_s >= max(LEAST_SHARE * rest * slow, LEAST_S) else None

    async def _move(self, part: Part, slot: EngineSlot) -> None:
        moving = part.open
        part.target = slot
        try:
            await part.slot.engine.abort(sorted(request.rid for request in moving))
        except EngineError as error:
            part.target = None
            _log.warning("samples not moved", engine=part.slot.engine_id, error=str(error))

    def moved(self, progress: GroupProgress, here: EngineSlot, there: EngineSlot, samples: int) -> None:
        """Note that so many samples begin or go on at another engine."""
        self._counters.samples_moved += samples
        here.moved_samples += samples
        lease = progress.lease.lease_id
        _log.info("samples moved", samples=samples, lease=lease, engine=here.engine_id, to=there.engine_id)

    def _learn(self, part: Part, before: dict[int, int]) -> None:
        now = time.monotonic(), part.slot.decoding.request_s()
        for index, tokens in before.items():
            sample = part.progress.samples[index]
            new = len(sample) - tokens
            if sample.finish is None or new <= 0:
                continue
            self.lengths.saw(len(sample))
            ended_at, decoded_s = part.ends.get(index, now)
            took_s = ended_at - part.began_at
            if took_s > 0:
                self.paces.saw((decoded_s - part.decoded_s) / took_s, took_s / new)


def _can_take(slot: EngineSlot, progress: GroupProgress, home: EngineSlot, request: SampleRequest) -> bool:
    """True when samples of `home` may go on at `slot`, by weights, lengths and sampling."""
    newest, here, there = progress.newest_of(progress.unfinished), home.info, slot.info
    is_fresh = slot.loaded >= home.loaded and (newest is None or slot.loaded >= newest)
    is_as_long = there.context_length >= here.context_length and there.max_input_tokens >= here.max_input_tokens
    if not (is_fresh and is_as_long):
        return False
    try:
        slot.engine.check_sampling(request)
    except InvalidField:
        return False
    return True
