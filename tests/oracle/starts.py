"""Starts of environments: what was begun, what failed, and how many more a limit allows.

Invariant: in any t ms at most start_burst + t * starts_per_minute / 60,000 tasks of an environment with a limit begin.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from buffer_service.domain.ops import EnvironmentWork
from buffer_service.domain.policy import UNSET, EnvironmentRule, RunPolicy

MINUTE_MS = 60_000


@dataclass(slots=True)
class Work:
    """Counts of one environment's tasks so far."""

    starts: int = 0
    failed_attempts: int = 0
    failed_tasks: int = 0
    failed_samples: int = 0
    owed: Fraction = Fraction(0)
    """Starts that were not paid back at `at` (ms)."""
    at: int = 0


@dataclass(slots=True)
class Starts:
    """Work by environment."""

    works: dict[str, Work] = field(default_factory=dict)

    def of(self, environment: str) -> Work:
        """The environment's work."""
        return self.works.setdefault(environment, Work())

    def take(self, policy: RunPolicy, environment: str, now: int) -> None:
        """A task begins."""
        work, rule = self.of(environment), _rule(policy, environment)
        work.starts += 1
        if rule is not None:
            work.owed, work.at = _owed(work, rule, now) + 1, now

    def may(self, policy: RunPolicy, environment: str, now: int) -> bool:
        """Tell whether a task may begin."""
        return not self.wait_ms(policy, environment, now)

    def wait_ms(self, policy: RunPolicy, environment: str, now: int) -> int:
        """Whole ms until one may."""
        rule = _rule(policy, environment)
        if rule is None:
            return 0
        excess = _owed(self.works.get(environment, Work()), rule, now) + 1 - max(rule.start_burst, 1)
        return max(0, ceil(excess * MINUTE_MS / rule.starts_per_minute))

    def view(self, policy: RunPolicy, now: int) -> list[EnvironmentWork]:
        """Part of RunView that has it."""
        return [
            EnvironmentWork(
                name,
                work.starts,
                work.failed_attempts,
                work.failed_tasks,
                work.failed_samples,
                self.wait_ms(policy, name, now),
            )
            for name, work in sorted(self.works.items())
        ]


def _rule(policy: RunPolicy, environment: str) -> EnvironmentRule | None:
    rules = (rule for rule in policy.environments if rule.environment == environment)
    return next((rule for rule in rules if rule.starts_per_minute != UNSET), None)


def _owed(work: Work, rule: EnvironmentRule, now: int) -> Fraction:
    return max(Fraction(0), work.owed - Fraction((now - work.at) * rule.starts_per_minute, MINUTE_MS))
