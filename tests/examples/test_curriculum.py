"""The curriculum's pools: drawn where rewards differ, and after a restart as if there had been none."""

from collections import Counter
from itertools import islice

from examples.curriculum.pools import POOLS, Pools
from examples.curriculum.rules import informative
from trainer_client import GroupFacts


def drawn(pools: Pools, count: int) -> list[tuple[str, object, tuple[int, ...]]]:
    return [
        (task.environment, task.metadata["answer"], tuple(task.prompt_token_ids)) for task in islice(iter(pools), count)
    ]


def report(pools: Pools, name: str, passed: float, groups: int = 60) -> None:
    for _ in range(groups):
        pools.report("t", {"pool": name}, [passed] * 8, "filtered")


def test_pools_that_teach_nothing_are_drawn_seldom() -> None:
    pools = Pools(1)
    report(pools, "easy", 1.0)
    report(pools, "hard", 0.0)
    counts = Counter(name for name, *_ in drawn(pools, 300))
    assert set(counts) == set(POOLS)
    assert counts["wider"] > 5 * max(counts["easy"], counts["hard"])


def test_a_failed_task_says_nothing_of_its_pool() -> None:
    pools = Pools(1)
    pools.report("t", {"pool": "easy"}, (), "failed")
    assert pools.rates["easy"] == 0.5


def test_a_state_goes_on_with_the_same_draws() -> None:
    first, second = Pools(1), Pools(1)
    drawn(first, 20)
    report(first, "wider", 0.25, 3)
    second.load_state(first.state())
    assert drawn(second, 50) == drawn(first, 50)


def test_the_filter_keeps_what_two_samples_agree_on() -> None:
    def facts(right: int) -> GroupFacts:
        of_samples = {"response_tokens": [2] * 8, "loss_tokens": [2] * 8, "truncated": [False] * 8}
        return GroupFacts(
            group_id="t/0",
            task_id="t",
            environment="easy",
            rewards=[1.0] * right + [0.0] * (8 - right),
            staleness=0,
            train_version=0,
            **of_samples,  # type: ignore[arg-type]
        )

    assert informative([facts(right) for right in (0, 1, 2, 6, 7, 8)]) == [False, False, True, True, False, False]
