"""How long the machine runs, from the environment.

RB_MODEL_OPERATIONS: operations in all, default 8,000. RB_MODEL_SEED: a number for other histories than the fixed ones
that every run without it repeats. RB_MODEL_SHRINK=1: look for the shortest history that fails (up to five minutes).
"""

import os
from collections import Counter
from collections.abc import Collection

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import RunMachine
from tests.model.moods import MOODS
from tests.model.subjects import Subject

OPERATIONS = int(os.environ.get("RB_MODEL_OPERATIONS", "8000"))
SEED = os.environ.get("RB_MODEL_SEED")
SHRINK = os.environ.get("RB_MODEL_SHRINK") == "1"

STEPS = 40
"""Actions of one history; some are several operations."""

OPERATIONS_PER_HISTORY = 55
"""On average, with those that uncover what is hidden at its end."""


def settings(operations: int, *, phases: tuple[hypothesis.Phase, ...]) -> hypothesis.settings:
    """Enough histories for so many operations."""
    return hypothesis.settings(
        max_examples=operations // OPERATIONS_PER_HISTORY + 1,
        stateful_step_count=STEPS,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )


def explore(
    subject: Subject, operations: int, *, moods: Collection[str] = MOODS.keys(), shrink: bool = SHRINK
) -> Counter[str]:
    """Run histories of these moods on the model and a subject; how often each outcome was seen. Raises Disagreement."""
    seen: Counter[str] = Counter()
    phases = (hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else []))
    for mood in moods:
        members = {"subject": subject, "seen": seen, "mood": mood}
        machine = type("RunMachineOnSubject", (RunMachine,), members)
        if SEED is not None:
            hypothesis.seed(int(SEED))(machine)
        share = operations * 11 // 10 // len(moods)
        run_state_machine_as_test(machine, settings=settings(share, phases=phases))
    return seen
