"""Records of what was sent and what went wrong: counts, and failures with what is needed to see them again."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

SHARES = {"rpc": 0.2, "bundle": 0.76, "http": 0.04}
"""Shares of the messages: RPCs (and messages of streams); groups of bundles that are each judged by themselves;
requests to the admin page; frames to the port of gRPC.
"""
AHEAD, PACE_S = 0.02, 0.02
NEVER = frozenset({"INTERNAL", "UNKNOWN"})
"""Codes that no message may be answered."""
SHOWN = 4_000
"""Hexadecimal digits of a message that are printed."""
KEPT = 12
"""Failures that are kept; one of a kind."""


@dataclass(frozen=True)
class Failure:
    """Something that must not be."""

    what: str
    kind: str
    """Failures of the same kind are one."""
    method: str = ""
    message: bytes = b""

    def __str__(self) -> str:
        """Text for a person, with the message as hexadecimal digits."""
        if not self.method:
            return self.what
        digits = self.message.hex()
        more = f"… ({len(self.message)} bytes)" if len(digits) > SHOWN else ""
        return f"{self.what}\n    method  {self.method}\n    message {digits[:SHOWN] or '(empty)'}{more}"


@dataclass
class Verdicts:
    """Verdicts of one run of the fuzz."""

    budget: int
    sent: Counter[str] = field(default_factory=Counter)
    """Messages by their kind in SHARES."""
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answers by method and status."""
    failures: dict[str, Failure] = field(default_factory=dict)

    def fail(self, failure: Failure) -> None:
        if len(self.failures) < KEPT:
            self.failures.setdefault(failure.kind, failure)

    async def left(self, kind: str) -> bool:
        """True while `kind` has not had its share of the budget; waits while it is ahead of the others: they are to
        meet from the first message to the last.
        """
        while self._part(kind) > AHEAD + min(map(self._part, SHARES)):  # noqa: ASYNC110 - nobody tells of each message
            await asyncio.sleep(PACE_S)
        return self._part(kind) < 1

    def _part(self, kind: str) -> float:
        return min(1.0, self.sent[kind] / (SHARES[kind] * self.budget))
