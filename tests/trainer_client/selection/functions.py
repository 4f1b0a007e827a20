"""Functions that select groups, as users might write them, good and bad."""

import itertools
import os
import time
from collections.abc import Sequence

from trainer_client.selection.facts import GroupFacts

CALLS = itertools.count(1)


def informative(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep groups whose rewards differ."""
    return [group.reward_std > 0 for group in groups]


def solved(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep what was not said to be known already."""
    print("functions may print")
    return [group.metadata.get("answer") != 3 for group in groups]


def every_other_call(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep all groups in every second call: the process has a memory."""
    return [next(CALLS) % 2 == 0] * len(groups)


def late(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep groups from the tenth call on."""
    return [next(CALLS) >= 10] * len(groups)


def third_choice(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep groups from the third call on."""
    return [next(CALLS) >= 3] * len(groups)


def everything(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep all groups."""
    return [True] * len(groups)


def best_two(groups: Sequence[GroupFacts]) -> list[bool]:
    """Keep the two groups with the highest mean reward."""
    best = sorted(groups, key=lambda group: group.mean_reward)[-2:]
    return [group in best for group in groups]


def raises(groups: Sequence[GroupFacts]) -> list[bool]:
    """Raise."""
    raise KeyError("difficulty")


def solved_at_second_try(groups: Sequence[GroupFacts]) -> list[bool]:
    """Raise in the first call, then keep what was not said to be known already."""
    if next(CALLS) == 1:
        raise KeyError("difficulty")
    return solved(groups)


def hangs(groups: Sequence[GroupFacts]) -> list[bool]:
    """Hang."""
    time.sleep(600)
    return []


def slow(groups: Sequence[GroupFacts]) -> list[bool]:
    """Take a while over the first call, and keep nothing of it."""
    first = next(CALLS) == 1
    time.sleep(0.5 * first)
    return [not first] * len(groups)


def dies(groups: Sequence[GroupFacts]) -> list[bool]:
    """End the process."""
    os._exit(3)


def short(groups: Sequence[GroupFacts]) -> list[bool]:
    """Return too little."""
    return []


no_function = 3
