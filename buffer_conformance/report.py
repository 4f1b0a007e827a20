"""Verdicts as a table for people, and as JSON."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from buffer_conformance.rules.rule import Outcome, Verdict

_WIDTH = 118
_SHOWN = 3


def has_failed(verdicts: Sequence[Verdict]) -> bool:
    """True when any rule was broken."""
    return any(verdict.outcome is Outcome.FAILED for verdict in verdicts)


def as_text(verdicts: Sequence[Verdict]) -> str:
    """Report of a line for each rule, with the violations below a broken one."""
    lines = []
    for verdict in verdicts:
        times = f"{verdict.exercised}×" if verdict.exercised else ""
        lines.append(f"{verdict.rule.id:<4} {verdict.outcome:<14} {times:>6}  {verdict.rule.sentence}")
        for violation in verdict.violations[:_SHOWN]:
            lines += textwrap.wrap(violation, _WIDTH, initial_indent=" " * 7 + "- ", subsequent_indent=" " * 9)
        if len(verdict.violations) > _SHOWN:
            lines.append(" " * 9 + f"and {len(verdict.violations) - _SHOWN} more")
        if verdict.outcome is Outcome.FAILED:
            lines.append(" " * 9 + f"see docs/protocol.md, {verdict.rule.reference}")
    counts = Counter(verdict.outcome for verdict in verdicts)
    lines.append(", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome]))
    return "\n".join(lines)


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """`passed` and one entry a rule."""
    return {
        "passed": not has_failed(verdicts),
        "rules": [
            {
                "id": verdict.rule.id,
                "sentence": verdict.rule.sentence,
                "reference": verdict.rule.reference,
                "outcome": str(verdict.outcome),
                "exercised": verdict.exercised,
                "violations": list(verdict.violations),
            }
            for verdict in verdicts
        ],
    }
