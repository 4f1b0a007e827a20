"""Rules over a record, and verdicts.

A rule is a pure function: it counts how often the record gave it something to judge, and says in words what broke it.
A rule that had nothing to judge is "not exercised", never passed.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from buffer_conformance.record import Record


@dataclass(slots=True)
class Finding:
    """What a rule found. `exercised` counts what it judged."""

    exercised: int = 0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
        """Judge one thing."""
        self.exercised += 1
        if not holds:
            self.violations.append(otherwise)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the protocol."""

    id: str
    sentence: str
    reference: str
    """Where it comes from: a heading of docs/protocol.md, or a message of the proto files."""
    check: Callable[[Record], Finding]


class Outcome(enum.StrEnum):
    """What became of a rule."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_EXERCISED = "not exercised"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's outcome on one record."""

    rule: Rule
    outcome: Outcome
    exercised: int
    violations: Sequence[str]


def judged(rules: Sequence[Rule], record: Record) -> list[Verdict]:
    """Every rule's verdict, in order."""
    verdicts = []
    for rule in rules:
        finding = rule.check(record)
        outcome = Outcome.PASSED if finding.exercised else Outcome.NOT_EXERCISED
        if finding.violations:
            outcome = Outcome.FAILED
        verdicts.append(Verdict(rule, outcome, finding.exercised, tuple(finding.violations)))
    return verdicts
