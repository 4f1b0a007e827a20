"""Rules over a record, and verdicts.

A rule's check reads the record: it counts how often there was something to judge, and says in words what broke the
rule. A rule that had nothing to judge is "not exercised", never passed.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from buffer_conformance.record import Record


@dataclass(slots=True)
class Finding:
    """Result of a rule's check: its violations; `exercised` counts the cases that it judged."""

    exercised: int = 0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
        """Judge one case: count it, and note a violation where the condition does not hold."""
        self.exercised += 1
        if not holds:
            self.violations.append(otherwise)


Check: TypeAlias = Callable[[Record, Finding], None]
"""Check of a record, whose result goes into the finding."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the protocol: a sentence, its reference, and a check of the record."""

    id: str
    sentence: str
    reference: str
    """Origin of the rule: a heading of docs/protocol.md, or a message of the proto files."""
    check: Check


def rule(id_: str, sentence: str, reference: str) -> Callable[[Check], Rule]:
    """Make the rule of the check that this decorates."""
    return partial(Rule, id_, sentence, reference)


class Outcome(enum.StrEnum):
    """Outcome of a rule: passed, failed, or not exercised."""

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
    """Verdicts of the rules, in the rules' order."""
    verdicts = []
    for each in rules:
        finding = Finding()
        each.check(record, finding)
        outcome = Outcome.PASSED if finding.exercised else Outcome.NOT_EXERCISED
        if finding.violations:
            outcome = Outcome.FAILED
        verdicts.append(Verdict(each, outcome, finding.exercised, tuple(finding.violations)))
    return verdicts
