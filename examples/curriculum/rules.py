"""The example's filter as a function: `SessionOptions(filter="examples.curriculum.rules:informative")`."""

from collections.abc import Sequence

from trainer_client import GroupFacts


def informative(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep groups with at least two samples that are right, and two that are not: a single one is noise, as often."""
    return [2 <= sum(group.rewards) <= len(group.rewards) - 2 for group in groups]
