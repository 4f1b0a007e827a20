"""Engines: what was last said of each, when, and which have a permit to be out of service for a load.

Invariant: permits are given while fewer than the policy's are held, in the order in which they were asked for first. A
policy that lowers their number takes none back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from buffer_service.domain.ops import EngineReport

PERMIT_TTL_MS = 60_000
"""Time that a place is kept without a word from its engine."""

TURN_TTL_MS = 5_000
"""Time that a waiting engine keeps its turn without a word."""

FORGOTTEN_MS = 3_600_000
"""An engine or an idle worker that is silent for longer has never been."""

_IN_SERVICE = ("ready", "loading")
"""States of engines that serve, or load after they have: only these can be taken out of service."""


@dataclass(slots=True)
class Engines:
    """Engines by id."""

    reports: dict[str, EngineReport] = field(default_factory=dict)
    heard_ms: dict[str, int] = field(default_factory=dict)
    permits: dict[str, int] = field(default_factory=dict)
    """Places, with the time until when (ms, inclusive)."""
    line: dict[str, int] = field(default_factory=dict)
    """Line of those who wait for a permit, with the time since when."""
    load_lags: dict[str, int] = field(default_factory=dict)
    """Time in ms from the last publish that an engine loaded to its report of that."""

    def report(self, report: EngineReport, now: int) -> bool:
        """Record it; returns whether it says anything new. The turn of one that was silent for too long is over."""
        if not self._keeps_turn(report.engine_id, now):
            self.line.pop(report.engine_id, None)
        said = replace(report, wants_load=False, reload_counters=(), silent_ms=0)
        before = self.reports.get(report.engine_id)
        is_news = before is None or _without_counters(before) != _without_counters(said)
        self.reports[report.engine_id] = said
        self.heard_ms[report.engine_id] = now
        return is_news

    def ask(self, report: EngineReport, limit: int, now: int) -> bool:
        """Tell whether the engine may load now; at most `limit` (0: any number) may at once."""
        name = report.engine_id
        needs_permit = limit > 0 and report.state in _IN_SERVICE
        if not needs_permit or not report.wants_load:
            self._leave(name)
            return not needs_permit
        held = self.held(now)
        if name not in held:
            self.line.setdefault(name, now)
            if self._before(name, now) >= limit - len(held):
                return False
            del self.line[name]
        self.permits[name] = now + PERMIT_TTL_MS
        return True

    def _before(self, engine_id: str, now: int) -> int:
        """Count how many wait for longer; of those that asked at once, the first by name goes first."""
        turn = self.line[engine_id], engine_id
        return sum((since, other) < turn and self._keeps_turn(other, now) for other, since in self.line.items())

    def _keeps_turn(self, engine_id: str, now: int) -> bool:
        return self.heard_ms.get(engine_id, 0) >= now - TURN_TTL_MS

    def _leave(self, engine_id: str) -> None:
        self.permits.pop(engine_id, None)
        self.line.pop(engine_id, None)

    def held(self, now: int) -> set[str]:
        """Engines that have a permit."""
        return {engine_id for engine_id, until in self.permits.items() if until >= now}

    def forget_silent(self, now: int) -> Sequence[str]:
        """Forget engines that have been silent for too long; returns which."""
        silent = [engine_id for engine_id, heard in self.heard_ms.items() if heard < now - FORGOTTEN_MS]
        for engine_id in silent:
            del self.reports[engine_id], self.heard_ms[engine_id]
            self.load_lags.pop(engine_id, None)
            self._leave(engine_id)
        return silent

    def view(self, now: int) -> Sequence[EngineReport]:
        """View in order of engine ids."""
        return [
            replace(report, silent_ms=now - self.heard_ms[engine_id])
            for engine_id, report in sorted(self.reports.items())
        ]


def _without_counters(report: EngineReport) -> EngineReport:
    """Return what others wait for: how much was decoded is not."""
    return replace(report, decoded_tokens=0, decode_busy_ms=0, decode_request_ms=0)
