"""Suites for workers and for trainers, by name: their scenarios, and the rules that judge the record."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_conformance.record import Record
from buffer_conformance.rules.rule import Rule
from buffer_conformance.rules.trainer import TRAINER_RULES
from buffer_conformance.rules.worker import WORKER_RULES
from buffer_conformance.scenarios.trainer import TRAINER_SCENARIOS, run_trainer_suite
from buffer_conformance.scenarios.worker import WORKER_SCENARIOS, run_worker_suite
from buffer_conformance.stage import SuiteOptions


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite for one kind of candidate: its scenarios, and the rules that judge the record."""

    run: Callable[[SuiteOptions], Coroutine[Any, Any, Record]]
    rules: Sequence[Rule]
    scenarios: Sequence[str]
    """Names of the scenarios, in the order in which they are run."""


SUITES: Mapping[str, Suite] = {
    "worker": Suite(run_worker_suite, WORKER_RULES, tuple(WORKER_SCENARIOS)),
    "trainer": Suite(run_trainer_suite, TRAINER_RULES, tuple(TRAINER_SCENARIOS)),
}
"""Suites by kind of candidate."""
