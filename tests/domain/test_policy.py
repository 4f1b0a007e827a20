import re

import pytest

from buffer_service.domain.policy import (
    UNSET,
    EnvironmentRule,
    Order,
    OverflowAction,
    RunPolicy,
    StaleAction,
    StalenessMeasure,
)
from buffer_wire.errors import InvalidField, InvalidPolicy


def test_the_default_queue_holds_one_batch() -> None:
    assert RunPolicy(batch_groups=7).max_queued_groups == 7


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("batch_groups", 0, "between 1 and 65536"),
        ("batch_groups", 65_537, "between 1 and 65536"),
        ("max_queued_groups", -1, "between 1 and 10000000"),
        ("max_queued_tokens", -1, "between 0 and"),
        ("max_queued_bytes", (1 << 20) - 1, "between 1048576 and"),
        ("max_staleness", -2, "between 0 and 1000000"),
        ("max_inflight_groups", -1, "between 0 and 10000000"),
        ("max_lookahead", 1_000_001, "between 0 and 1000000"),
        ("lease_ttl_ms", 999, "between 1000 and 3600000"),
        ("max_attempts", 0, "between 1 and 1000"),
        ("retry_backoff_ms", 600_001, "between 0 and 600000"),
        ("failure_budget", -2, "between 0 and 10000000"),
        ("max_pending_tasks", 0, "between 1 and 10000000"),
        ("prefetch_batches", 65, "between 0 and 64"),
        ("batches_per_publish", 0, "between 1 and 1000"),
        ("retained_steps", 0, "between 1 and 100000"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name_value_and_bound(field: str, value: int, bounds: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(f"policy.{field} is {value}; it must be {bounds}")) as refused:
        RunPolicy(**{field: value})  # type: ignore[arg-type]
    assert refused.value.attributes["field"] == f"policy.{field}"


@pytest.mark.parametrize("field", ["max_staleness", "max_lookahead", "failure_budget"])
def test_bounds_that_may_be_unset_are_unset_by_default(field: str) -> None:
    assert getattr(RunPolicy(), field) == UNSET


@pytest.mark.parametrize("field", ["max_inflight_groups", "lease_ttl_ms", "retained_steps"])
def test_other_bounds_cannot_be_unset(field: str) -> None:
    with pytest.raises(InvalidField):
        RunPolicy(**{field: UNSET})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "field", "why"),
    [
        (
            {"batch_groups": 8, "max_queued_groups": 7},
            "max_queued_groups",
            "7 groups can never hold a batch of 8 groups",
        ),
        (
            {"batch_groups": 8, "max_queued_tokens": 7},
            "max_queued_tokens",
            "7 tokens can never hold a batch of 8 groups",
        ),
        ({"max_staleness": 0, "prefetch_batches": 1}, "max_staleness", "0 is below 1"),
        ({"max_staleness": 1, "prefetch_batches": 4, "batches_per_publish": 2}, "max_staleness", "1 is below 2"),
        (
            {"max_lookahead": 1, "prefetch_batches": 2},
            "max_lookahead",
            "1 lets too few groups exist for the 2 versions",
        ),
    ],
)
def test_a_policy_under_which_the_run_could_not_progress_is_refused(
    policy: dict[str, int], field: str, why: str
) -> None:
    with pytest.raises(InvalidPolicy, match=re.escape(f"policy refused at {field}: {why}")) as refused:
        RunPolicy(**policy)  # type: ignore[arg-type]
    assert refused.value.attributes["field"] == field


@pytest.mark.parametrize(
    ("prefetch", "per_publish", "least"), [(0, 1, 0), (1, 1, 1), (0, 4, 0), (1, 4, 1), (4, 2, 2), (5, 2, 3)]
)
def test_the_least_staleness_counts_the_versions_between_a_pull_and_its_training(
    prefetch: int, per_publish: int, least: int
) -> None:
    policy = RunPolicy(prefetch_batches=prefetch, batches_per_publish=per_publish)
    assert policy.least_staleness == least
    bounded = RunPolicy(prefetch_batches=prefetch, batches_per_publish=per_publish, max_staleness=least)
    assert bounded.max_staleness == least


def test_a_policy_survives_the_way_to_the_store_and_back() -> None:
    policy = RunPolicy(
        batch_groups=3,
        overflow_action=OverflowAction.BLOCK,
        stale_action=StaleAction.RECYCLE,
        max_staleness=2,
        reserve_queue_space=True,
        staleness_measure=StalenessMeasure.TAIL,
        order=Order.LIFO,
        equal_shards=True,
        environments=(EnvironmentRule(environment="math", share=3), EnvironmentRule(environment="code", priority=9)),
    )
    stored = policy.to_store()
    assert {type(value) for value in stored.values()} == {int, str, list}
    assert stored["environments"] == [["code", -1, 9], ["math", 3, -1]], "by name"
    assert RunPolicy.from_store({**stored, "a field of a later version": 1}) == policy
