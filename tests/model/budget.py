"""Length of the machine's run, from the environment.

RB_MODEL_TIMES: a factor on every number of operations, default 1. RB_MODEL_SEED: a number for other histories than the
fixed ones that every run without it repeats. RB_MODEL_SHRINK_S: for how long to look for a shorter history that fails,
default 30 seconds.
"""

import os
from collections import Counter
from collections.abc import Collection
from typing import Any

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import RunMachine
from tests.model.moods import MOODS
from tests.model.pair import Disagreement, Pair
from tests.model.shrinking import shrink
from tests.model.subjects import Subject

TIMES = float(os.environ.get("RB_MODEL_TIMES", "1"))
SEED = int(os.environ.get("RB_MODEL_SEED", "0"))
SHRINK_S = float(os.environ.get("RB_MODEL_SHRINK_S", "30"))

STEPS = 6
"""Steps of one history, of several actions each."""

OPERATIONS_PER_HISTORY = 120
"""About, with those that uncover what is hidden at its end."""


def explore(
    subject: Subject,
    operations: int,
    *,
    moods: Collection[str] = MOODS.keys(),
    kind: type[Pair] = Pair,
    shrink_s: float = SHRINK_S,
    seed: str = "",
) -> Counter[str]:
    """Run histories on the model and a subject until there were that many operations, shared evenly by the moods;
    how often each outcome was seen. Raises Disagreement with a history to be stored in histories/.
    """
    seen: Counter[str] = Counter()
    try:
        for number, mood in enumerate(moods, 1):
            enough, attempt, expected = number * operations // len(moods), 0, OPERATIONS_PER_HISTORY
            while (lacking := enough - seen["operations"]) > 0:
                attempt += 1
                before = seen.copy()
                members = {"subject": subject, "seen": seen, "mood": MOODS[mood], "kind": kind}
                _run(members, lacking // expected + 1, seed=f"{SEED} {seed} {mood} {attempt}")
                made = seen - before
                expected = made["operations"] // made["histories"]
    except Disagreement as found:
        if not shrink_s:
            raise
        shorter = shrink(subject, found, seconds=shrink_s, kind=kind)
    else:
        return seen
    raise shorter


def _run(members: dict[str, Any], histories: int, *, seed: str) -> None:
    machine = type("RunMachineOnSubject", (RunMachine,), members)
    settings = hypothesis.settings(
        max_examples=histories,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        # Hypothesis would shrink what it drew; `shrink` shortens what came of it.
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
