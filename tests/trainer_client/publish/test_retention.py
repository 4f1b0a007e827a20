"""Tests of which versions stay: the newest, and every one that a resume can go back to."""

import pytest

from trainer_client.publish.retention import Kept, expendable

pytestmark = pytest.mark.matrix


def every_publish_commits_one_step(count: int) -> list[Kept]:
    return [Kept(f"v{i}", order=i, committed_steps=i) for i in range(1, count + 1)]


def names(entries: list[Kept]) -> list[str]:
    return [entry.name for entry in entries]


def test_without_a_checkpoint_everything_may_be_gone_back_to() -> None:
    assert expendable(every_publish_commits_one_step(50), keep=2, checkpointed_steps=0) == []


def test_a_checkpoint_lets_go_what_lies_before_its_own_version() -> None:
    kept = every_publish_commits_one_step(10)
    # A resume at 6 is offered the version with 6 steps in it; at 7 that of 7, and so on.
    assert names(expendable(kept, keep=1, checkpointed_steps=6)) == ["v1", "v2", "v3", "v4", "v5"]


def test_the_version_before_a_checkpoint_between_publishes_stays() -> None:
    kept = [Kept("a", 1, 0), Kept("b", 2, 4), Kept("c", 3, 8), Kept("d", 4, 12)]
    assert names(expendable(kept, keep=1, checkpointed_steps=10)) == ["a", "b"]


def test_the_newest_stay_in_any_case() -> None:
    kept = every_publish_commits_one_step(10)
    assert names(expendable(kept, keep=7, checkpointed_steps=10)) == ["v1", "v2", "v3"]


def test_two_versions_of_the_same_step_leave_the_later_to_go_back_to() -> None:
    kept = [Kept("a", 1, 3), Kept("b", 2, 3), Kept("c", 3, 4), Kept("d", 4, 5)]
    assert names(expendable(kept, keep=1, checkpointed_steps=3)) == ["a"]


def test_an_abandoned_timeline_goes_as_it_ages() -> None:
    kept = [Kept("a", 1, 3), Kept("lost1", 2, None), Kept("lost2", 3, None), Kept("b", 4, 4)]
    assert names(expendable(kept, keep=2, checkpointed_steps=0)) == ["lost1"]


def test_a_version_that_is_not_published_yet_is_among_the_newest() -> None:
    kept = [Kept("a", 1, 1), Kept("b", 2, 2), Kept("being-published", 3, None)]
    assert names(expendable(kept, keep=1, checkpointed_steps=2)) == ["a"]
