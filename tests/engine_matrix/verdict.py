"""Conditions that hold at the end of a run, whatever happened in it: no task and no token is gone without a record.

Tasks: every submitted one was delivered, once, and none failed. Tokens: of every worker that ended in good order,
received + taken over = pushed + handed back + discarded; and the trainer was given what the workers say they pushed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.engine_matrix.truth import Seen, twice
from trainer_client.state import RunState


def check_tasks(seen: Seen, submitted: int, state: RunState) -> None:
    """Every task t000000, t000001, … was delivered once; the ledgers say the same."""
    assert not twice(seen.task_ids)
    assert set(seen.task_ids) == {f"t{i:06d}" for i in range(submitted)}
    tasks, groups = state.ledger.tasks, state.ledger.groups
    assert state.ledger.balanced
    assert (tasks.submitted, tasks.completed) == (submitted, submitted)
    assert groups.accepted == groups.trained
    assert (groups.trained.groups, groups.trained.samples) == (seen.groups, seen.samples)
    assert not state.failures


def check_account(words: Mapping[str, Any]) -> None:
    """One worker's account of the tokens that it received, by its last words."""
    came = words["tokens"] + words["tokens_resumed"]
    went = words["tokens_pushed"] + words["tokens_returned"] + sum(words["tokens_discarded"].values())
    assert came == went, words


def check_tokens(words: Sequence[Mapping[str, Any]], seen: Seen, state: RunState) -> None:
    """The accounts of all workers of a run, where all of them ended in good order."""
    for each in words:
        check_account(each)
    # A push that a drain gave up may have been accepted all the same. Its worker, which is then told that the lease has
    # ended, knows no better than to count those tokens as discarded.
    pushed = sum(each["tokens_pushed"] for each in words)
    unheard = sum(each["tokens_discarded"].get("lease_ended", 0) for each in words)
    assert pushed <= seen.tokens <= pushed + unheard, (pushed, seen.tokens, unheard)
    left = state.statistics["partial_rollout_tokens_discarded"]
    assert sum(each["tokens_returned"] for each in words) == sum(each["tokens_resumed"] for each in words) + left
