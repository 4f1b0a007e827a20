"""Limit of the groups whose samples run on one engine at once: fixed, or following the use of the engine's KV cache.

Additive increase, multiplicative decrease: the limit grows by one group for as many ended samples as it allows. It
falls by a share when the cache is fuller than wanted, or requests wait inside the engine. Samples that end are its
clock: a sample fills the cache until its end, so what a limit does shows only when those in flight have ended.
"""

import asyncio

import structlog

from rollout_workers.slots.slot import EngineSlot

POLL_S = 1.0
"""Time between two looks at the engine's load."""
DECREASE = 0.9
"""Share of the samples in flight that are left after a fall."""
GROW_BELOW = 0.95
"""Share of the target up to which the limit grows: between this and the target it rests."""
DOUBLE_BELOW = 0.5
"""Share of the target up to which each sample that ends makes room for two."""

_log = structlog.get_logger()


class Aimd:
    """Additive increase and multiplicative decrease of a limit in samples.

    `target`: share of the KV cache that may be in use. `step`: samples by which the limit grows while as many end as it
    allows, and the least that it falls to. `most`: the highest limit.
    """

    def __init__(self, start: float, *, target: float, step: int, most: int) -> None:
        self._target = target
        self._step = step
        self._most = max(most, step)
        self.limit = min(max(start, step), self._most)
        self.falls = 0
        self._hold = 0.0
        """Samples that have to end before the last fall has shown."""

    def observe(self, *, usage: float, is_crowded: bool, in_flight: int, ended: int) -> None:
        """Take in the engine's state: share of its cache in use, whether requests wait in it, samples that run, and
        those that have ended since the last look.
        """
        self._hold -= ended
        if self._hold > 0:
            return
        if usage > self._target or is_crowded:
            self.limit = max(min(self.limit, in_flight) * DECREASE, self._step)
            self._hold = in_flight
            self.falls += 1
        elif usage < GROW_BELOW * self._target and in_flight > self.limit - 2 * self._step:
            more = 1.0 if usage < DOUBLE_BELOW * self._target else self._step / self.limit
            self.limit = min(self.limit + ended * more, self._most)


class InflightLimit:
    """Limit of one engine. `groups`: it, or where it begins. `kv_target`: share of the KV cache to follow; 0: none."""

    def __init__(self, slot: EngineSlot, groups: int, *, kv_target: float = 0.0) -> None:
        self._slot = slot
        self._groups = groups
        self._kv_target = kv_target
        self._aimd: Aimd | None = None
        self._group_size = 0
        self._ended = 0
        self._waited = False

    @property
    def groups(self) -> float:
        """Groups whose samples may run at once."""
        return self._groups if self._aimd is None else self._aimd.limit / self._group_size

    @property
    def samples(self) -> int:
        """Samples that may run at once; 0 before the size of a group is known."""
        return round(self.groups * self._group_size)

    def saw(self, group_size: int) -> None:
        """Note the size of a group that begins. A limit that follows the cache counts in groups of the first one."""
        if self._aimd is not None:
            return
        self._group_size, start = group_size, self._groups * group_size
        if self._kv_target:
            most = self._slot.info.max_running_requests or start
            self._aimd = Aimd(start, target=self._kv_target, step=group_size, most=most)

    async def run(self) -> None:
        """Follow the engine's load until cancelled."""
        slot = self._slot
        while self._kv_target:
            await asyncio.sleep(POLL_S)
            if self._aimd is None or not slot.reachable:
                continue
            await slot.load.ask(slot.engine, slot.in_flight, max_age_s=POLL_S / 2)
            ended, self._ended = slot.ended - self._ended, slot.ended
            # A request waits for a moment before it runs: once is no sign of a queue.
            waited, self._waited = self._waited, slot.load.waiting > 0
            if not slot.load.is_known:
                continue
            before, falls = self._aimd.limit, self._aimd.falls
            self._aimd.observe(
                usage=slot.load.token_usage,
                is_crowded=waited and self._waited,
                in_flight=slot.in_flight,
                ended=ended,
            )
            if self._aimd.falls > falls:
                why = {"kv_usage": round(slot.load.token_usage, 2), "waiting": slot.load.waiting}
                _log.info(
                    "fewer samples", engine=slot.engine_id, most=round(self._aimd.limit), was=round(before), **why
                )
            elif self._aimd.limit > before:
                slot.room.notify()
