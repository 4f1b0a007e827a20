"""Reasons for which a run is paused."""

from enum import StrEnum


class Pause(StrEnum):
    """Reason of a pause, the most urgent first."""

    STORE_ROLLED_BACK = "store_rolled_back"
    RESUMING = "resuming"
    OPERATOR = "operator"
    FAILURE_BUDGET_EXCEEDED = "failure_budget_exceeded"
