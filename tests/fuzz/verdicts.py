"""What was sent and what went wrong: counts, and failures with what is needed to see them again."""

from collections import Counter
from dataclasses import dataclass, field

NEVER = frozenset({"INTERNAL", "UNKNOWN"})
"""What no message may be answered."""
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
        """For a person, with the message as hexadecimal digits."""
        if not self.method:
            return self.what
        digits = self.message.hex()
        more = f"… ({len(self.message)} bytes)" if len(digits) > SHOWN else ""
        return f"{self.what}\n    method  {self.method}\n    message {digits[:SHOWN] or '(empty)'}{more}"


@dataclass
class Verdicts:
    """Of one run of the fuzz."""

    budget: int
    sent: Counter[str] = field(default_factory=Counter)
    """Messages by how they went: rpc, bundle, http, raw."""
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answers by method and status."""
    failures: dict[str, Failure] = field(default_factory=dict)

    def fail(self, failure: Failure) -> None:
        if len(self.failures) < KEPT:
            self.failures.setdefault(failure.kind, failure)

    def left(self, kind: str, share: float) -> bool:
        """True while `kind` has not had its share of the budget."""
        return self.sent[kind] < share * self.budget
