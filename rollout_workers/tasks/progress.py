"""The line that says every few seconds how a worker is doing."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from rollout_workers.counters import Counters
from rollout_workers.service.pusher import Pusher
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.drivers import Driver

_SLOW_PUSH_S = 60.0
_WHEN_THERE = ("leases_lost", "leases_cancelled", "samples_again", "samples_moved", "surplus_samples", "tokens_cached")
_log = structlog.get_logger()


class Progress:
    """Logs rates since its last line."""

    def __init__(
        self,
        counters: Counters,
        slots: Sequence[EngineSlot],
        drivers: Sequence[Driver],
        pusher: Pusher,
        *,
        every_s: float,
        evaluated: Counters | None = None,
    ) -> None:
        self._counters = counters
        self._slots = slots
        self._drivers = drivers
        self._pusher = pusher
        self._every_s = every_s
        self._evaluated = evaluated or Counters()
        self._last = (time.monotonic(), 0, 0)

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            self.line()

    def line(self) -> None:
        """Log one line now."""
        counters, now = self._counters, time.monotonic()
        then, samples, tokens = self._last
        self._last = (now, counters.samples, counters.tokens)
        spent = max(now - then, 1e-9)
        waiting = sorted({driver.waiting_on for driver in self._drivers} - {""})
        _log.info(
            "progress",
            groups_queued=counters.pushed["queued"],
            samples_per_s=round((counters.samples - samples) / spent, 1),
            tokens_per_s=round((counters.tokens - tokens) / spent, 1),
            loaded=" ".join(slot.loaded.label if slot.leasable else _state(slot) for slot in self._slots),
            reloads=sum(slot.reloads for slot in self._slots),
            leases=sum(driver.held for driver in self._drivers),
            generating=sum(driver.generating for driver in self._drivers),
            unanswered=len(self._pusher),
            reward_s=round(counters.reward_s, 1),
            **{name: count for name in _WHEN_THERE if (count := getattr(counters, name))},
            **{
                name: {_named(key): count for key, count in counts.items()}
                for name in ("infrastructure_errors", "policy_errors")
                if (counts := getattr(counters, name))
            },
            **{f"evaluated_{name}": count for name, count in self._evaluated.pushed.items()},
            **{f"push_{name}": count for name, count in counters.pushed.items() if name != "queued"},
            **{f"{way}_mb": round(size / 1e6, 1) for way, size in counters.pushed_bytes.items()},
            **{f"returned_{name}": count for name, count in counters.returned.items()},
            **({"waiting_on": "; ".join(waiting)} if waiting else {}),
            **({"last_error": counters.last_error} if now - counters.last_error_at < 2 * self._every_s else {}),
        )
        if self._pusher.oldest_s > _SLOW_PUSH_S:
            _log.warning(
                "no answer to a push",
                for_s=round(self._pusher.oldest_s),
                waiting_on="the service, or with a full queue the trainer's pulls",
            )


def _named(key: str | tuple[str, str]) -> str:
    """An environment, or one and the name of a failure, in a line."""
    return (key if isinstance(key, str) else ".".join(key)) or "(none)"


def _state(slot: EngineSlot) -> str:
    if slot.quarantined or slot.unfit:
        return f"{slot.loaded}({'quarantined' if slot.quarantined else 'unfit'})"
    if slot.reachable and slot.breaker.is_open:
        return f"{slot.loaded}(circuit open)"
    return f"{slot.loaded}(starting)" if slot.reachable else "(lost)"
