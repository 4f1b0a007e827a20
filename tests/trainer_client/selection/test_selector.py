"""Selectors: a function's answers, and one that raises, hangs or dies, named and replaced."""

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollout_buffer.v1 import groups_pb2 as pb
from trainer_client.batch import Group
from trainer_client.selection.facts import GroupFacts
from trainer_client.selection.selection import facts_of
from trainer_client.selection.selector import SelectionFailed, Selector

HERE = "tests.trainer_client.selection.functions"


def facts(*rewards: float, name: str = "a", **metadata: object) -> GroupFacts:
    count = len(rewards)
    return GroupFacts(
        group_id=f"{name}/0",
        task_id=name,
        environment="",
        metadata=metadata,
        rewards=rewards,
        response_tokens=[3] * count,
        loss_tokens=[3] * count,
        truncated=[False] * count,
        staleness=0,
        train_version=1,
    )


def selector(function: str, timeout_s: float = 60.0) -> closing[Selector]:
    return closing(Selector(f"{HERE}:{function}", timeout_s))


def _children() -> set[str]:
    """Pids of this process's children, those of other tests too."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    before = _children()
    yield
    assert _children() <= before


def test_a_function_sees_facts_and_says_what_is_kept() -> None:
    with selector("informative") as made:
        assert made.keeps([facts(0, 1), facts(1, 1), facts(0.5, 0.25)]) == [True, False, True]
        assert made.keeps([]) == []
    with selector("solved") as made:
        assert made.keeps([facts(1, answer=3), facts(1, answer=4)]) == [False, True]


def test_its_process_keeps_what_it_has_seen() -> None:
    with selector("every_other_call") as made:
        assert [made.keeps([facts(1)]) for _ in range(4)] == [[False], [True], [False], [True]]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("raises", "it raised KeyError: 'difficulty'"),
        ("short", "it returned 0 values for 1 groups"),
        ("dies", "its process ended with exit code 3"),
        ("no_function", "it cannot be imported: TypeError: .* is a int, no function"),
        ("missing", "it cannot be imported: AttributeError"),
    ],
)
def test_one_that_fails_is_named_each_time(function: str, why: str) -> None:
    with selector(function) as made:
        for _ in range(2):
            with pytest.raises(SelectionFailed, match=f"{HERE}:{function}: {why}"):
                made.keeps([facts(1)])


def test_one_that_hangs_is_named_and_ended() -> None:
    with selector("hangs", timeout_s=0.2) as made:
        with pytest.raises(SelectionFailed, match=r"hangs has not answered within its time, 0\.2 s"):
            made.keeps([facts(1)])
        assert made._process is None


def test_the_answer_to_a_question_that_was_interrupted_is_never_taken_for_the_next_one() -> None:
    with selector("slow") as made:
        made._start()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                made.keeps([facts(1)])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        assert made.keeps([facts(1, name="b"), facts(1, name="c")]) == [False, False]


def test_facts_of_rows_count_each_trajectory_once_and_policies_apart() -> None:
    rows = dataclasses.replace(
        facts(1, 1, 1, 0, 9, 5, 5),
        trajectories=[0, 0, 0, 1, 1, 0, 1],
        trainable=[True, True, True, True, False, True, True],
        policies=["", "", "", "", "", "judge", "judge"],
    )
    # Of the one policy 1 and 0, of the judge 5 and 5; the row with 9 is context.
    assert rows.mean_reward == (1 + 0 + 5 + 5) / 4
    assert rows.reward_std == pytest.approx(((0.25 + 0.25) / 4) ** 0.5)
    assert facts(0, 1).mean_reward == facts(0, 1).reward_std == 0.5
    # Two sides of a game whose policies have one name.
    both = dataclasses.replace(facts(1, -1, -1, 1), trajectories=[0, 0, 1, 1])
    assert (both.mean_reward, both.reward_std) == (0, 1)


def test_facts_say_what_the_service_counts() -> None:
    header = pb.GroupHeader(
        task_id="t", samples=[pb.Sample(trajectory=n, reward=r) for n, r in ((1, 1), (1, 1), (2, 0))]
    )
    header.samples[1].policy = "judge"
    header.samples[2].trainable = False
    seen = facts_of(Group(header.SerializeToString(), memoryview(b""), 0, 0, 0, 1))
    assert (seen.trajectories, seen.trainable, seen.policies) == ([0, 0, 1], [True, True, False], ["", "judge", ""])
    assert seen.mean_reward == 1
