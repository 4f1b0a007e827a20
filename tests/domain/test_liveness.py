"""Refusals of policies under which a run could not progress, beyond those that are about a single batch."""

import re
from typing import Any

import pytest

from buffer_service.domain.liveness import most_batch_groups
from buffer_service.domain.policy import EnvironmentRule, RunPolicy
from buffer_wire.errors import InvalidPolicy

MIB = 1 << 20
ONE_AND_THE_NEXT = "{}, what 1 uncommitted batches (prefetch_batches 0 + batches_per_publish 1) and the next one need"


@pytest.mark.parametrize(
    ("policy", "field", "why"),
    [
        ({"cancel_stale_leases": True}, "cancel_stale_leases", "needs max_staleness"),
        (
            {"cancel_stale_leases": True, "max_staleness": 1, "staleness_measure": "mean"},
            "cancel_stale_leases",
            "needs max_staleness, and staleness_measure head",
        ),
        (
            {"filter_min_response_tokens": 9, "filter_max_response_tokens": 8},
            "filter_max_response_tokens",
            "8 is below filter_min_response_tokens 9: no group passes",
        ),
        (
            {"filter_min_mean_reward_milli": 1, "filter_max_mean_reward_milli": 0},
            "filter_max_mean_reward_milli",
            "0 is below filter_min_mean_reward_milli 1: no group passes",
        ),
        (
            {"batch_groups": 4, "micro_batch_groups": 5, "max_queued_groups": 9},
            "micro_batch_groups",
            "5 groups are more than batch_groups 4",
        ),
        (
            {"batch_groups": 8, "micro_batch_groups": 4, "max_queued_groups": 3},
            "max_queued_groups",
            "3 groups can never hold a micro-batch of 4 groups a rank",
        ),
        (
            {"batch_tokens": 100, "max_queued_tokens": 199},
            "max_queued_tokens",
            "199 is below 200: a queue that has no room for another group may still hold less than batch_tokens 100",
        ),
        (
            {"batch_groups": 4, "quota_groups": 11, "prefetch_batches": 1},
            "quota_groups",
            "11 is below 12, what 2 uncommitted batches (prefetch_batches 1 + batches_per_publish 1) and the next one",
        ),
        ({"quota_tokens": 1_000}, "quota_tokens", "needs max_queued_tokens"),
        (
            {"max_queued_tokens": 100, "quota_tokens": 199},
            "quota_tokens",
            "199 is below 200, what 1 uncommitted batches",
        ),
        (
            {"batch_groups": 4, "micro_batch_groups": 2, "max_queued_tokens": 100, "quota_tokens": 399},
            "quota_tokens",
            ONE_AND_THE_NEXT.format("399 is below 400") + ", of up to 2 micro-batches each",
        ),
        (
            {"batch_groups": 5, "micro_batch_groups": 2, "max_queued_bytes": MIB, "quota_bytes": 6 * MIB - 1},
            "quota_bytes",
            f"{6 * MIB - 1} is below {6 * MIB}",
        ),
    ],
    ids=str,
)
def test_what_cannot_progress_is_refused_with_the_reason(policy: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidPolicy, match=re.escape(f"policy refused at {field}: {why}")) as refused:
        RunPolicy(**policy)
    assert refused.value.attributes["field"] == field


@pytest.mark.parametrize(
    "policy",
    [
        {"batch_tokens": 100, "max_queued_tokens": 200},
        {"batch_tokens": 100, "micro_batch_groups": 1, "max_queued_tokens": 50},
        {"batch_groups": 4, "quota_groups": 8},
        {"batch_groups": 4, "micro_batch_groups": 2, "max_queued_tokens": 100, "quota_tokens": 400},
        {"max_staleness": 1, "cancel_stale_leases": True},
        {"environments": (EnvironmentRule(environment="math", share=0),)},
    ],
    ids=str,
)
def test_what_just_can_is_not(policy: dict[str, Any]) -> None:
    RunPolicy(**policy)


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ({}, 100),
        ({"max_lookahead": 0}, 4),
        ({"max_lookahead": 2}, 12),
        ({"max_lookahead": 2, "prefetch_batches": 2}, 4),
        ({"max_lookahead": 1, "batches_per_publish": 3}, 16),
        ({"quota_groups": 11}, 5),
        ({"quota_groups": 16, "prefetch_batches": 2}, 4),
        ({"micro_batch_groups": 1}, 100),
        ({"micro_batch_groups": 2, "max_queued_bytes": MIB, "quota_bytes": 4 * MIB}, 4),
    ],
    ids=str,
)
def test_a_step_of_its_own_size_is_at_most_what_admission_and_quotas_let_exist(
    policy: dict[str, Any], most: int
) -> None:
    rules = RunPolicy(batch_groups=4, max_queued_groups=100, **policy)
    assert most_batch_groups(rules, 100) == most
    assert most >= rules.batch_groups, "the policy's own size is never refused"
