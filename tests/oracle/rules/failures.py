"""Consequences of failures: back-off of a task, and the budget of a run."""

from buffer_service.domain.policy import UNSET, RunPolicy

MAX_DOUBLINGS = 6
"""Back-off grows to 2^6 = 64 times the first one."""


def backoff_ms(policy: RunPolicy, failures: int) -> int:
    """Wait before a task is leased again after its `failures`-th failure (>= 1): doubles each time, up to 64 times."""
    return policy.retry_backoff_ms << min(failures - 1, MAX_DOUBLINGS)


def over_budget(policy: RunPolicy, failed_tasks: int) -> bool:
    """Tell whether more tasks have failed than the run survives."""
    return policy.failure_budget != UNSET and failed_tasks > policy.failure_budget
