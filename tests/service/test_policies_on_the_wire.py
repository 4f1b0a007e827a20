"""Policies as they travel: presets under what is set, bounds of the service, and nothing lost on the way back."""

from dataclasses import fields
from typing import Any

import pytest

from buffer_service.domain.policy import (
    UNSET,
    EnvironmentRule,
    Order,
    OverflowAction,
    RunPolicy,
    StaleAction,
    StalenessMeasure,
    TargetMeasure,
)
from buffer_service.domain.presets import fields_of
from buffer_service.rpc.convert.policies import QuotaBounds, policy, to_policy
from buffer_wire.errors import InvalidField, InvalidPolicy
from rollout_buffer.v1 import runs_pb2 as pb

ELABORATE = RunPolicy(
    batch_groups=8,
    max_queued_groups=64,
    max_queued_tokens=100_000,
    max_queued_bytes=1 << 21,
    overflow_action=OverflowAction.BLOCK,
    max_staleness=3,
    stale_action=StaleAction.RECYCLE,
    max_inflight_groups=7,
    reserve_queue_space=True,
    max_lookahead=3,
    lease_ttl_ms=2_000,
    max_attempts=2,
    retry_backoff_ms=1,
    failure_budget=9,
    max_pending_tasks=99,
    prefetch_batches=1,
    batches_per_publish=2,
    retained_steps=5,
    preset="areal(3)",
    order=Order.STALEST_FIRST,
    stages=("rewards", "reference"),
    environments=(
        EnvironmentRule(environment="", share=0, starts_per_minute=90, start_burst=4),
        EnvironmentRule(environment="code", priority=200),
        EnvironmentRule(environment="math", share=3, priority=0),
    ),
    staleness_measure=StalenessMeasure.HEAD,
    max_incarnations=4,
    cancel_stale_leases=True,
    filter_equal_rewards=True,
    filter_min_response_tokens=2,
    filter_max_response_tokens=4_096,
    filter_min_mean_reward_milli=-500,
    filter_max_mean_reward_milli=900,
    min_acceptance_milli=250,
    batch_tokens=50_000,
    equal_shards=True,
    micro_batch_groups=2,
    max_version_spread=6,
    quota_groups=100,
    quota_tokens=1_600_000,
    quota_bytes=1 << 25,
    max_retained_bytes=1 << 30,
    record_groups=True,
    wait_replicas=1,
    wait_timeout_ms=50,
    max_unavailable_engines=3,
    fresh_start_ms=250,
    stale_wait_ms=30_000,
    order_window_groups=7,
    longest_first=True,
    target_staleness_milli=1_500,
    target_measure=TargetMeasure.TOKEN,
)
REUSED = RunPolicy(max_uses=3, reuse_share_milli=1_500, reuse_max_staleness=2)
"""Policy of fields that are refused beside batch_tokens."""


def test_the_elaborate_policy_leaves_no_field_at_its_default() -> None:
    same = [
        field.name
        for field in fields(RunPolicy)
        if all(getattr(one, field.name) == getattr(RunPolicy(), field.name) for one in (ELABORATE, REUSED))
    ]
    assert same == ["staleness_measure"], "the others are refused together with cancel_stale_leases"


@pytest.mark.parametrize(
    "effective",
    [
        RunPolicy(),
        ELABORATE,
        REUSED,
        RunPolicy(max_staleness=0, max_lookahead=0, failure_budget=0, max_version_spread=0),
        RunPolicy(staleness_measure=StalenessMeasure.TAIL, max_staleness=1),
        RunPolicy(staleness_measure=StalenessMeasure.MEAN, order=Order.LIFO, overflow_action=OverflowAction.REJECT),
    ],
    ids=["default", "elaborate", "reused", "zeros", "tail", "mean"],
)
def test_an_effective_policy_travels_there_and_back(effective: RunPolicy) -> None:
    assert policy(pb.RunPolicy.FromString(to_policy(effective).SerializeToString())) == effective


def test_every_field_of_an_effective_policy_is_filled_in_but_what_is_unset_on_purpose() -> None:
    message = to_policy(RunPolicy())
    unset = {f.name for f in pb.RunPolicy.DESCRIPTOR.fields if f.has_presence and not message.HasField(f.name)}  # type: ignore[arg-type]
    assert unset == {
        "max_staleness",
        "max_lookahead",
        "failure_budget",
        "max_version_spread",
        "reuse_max_staleness",
        "filter_min_mean_reward_milli",
        "filter_max_mean_reward_milli",
    }
    assert message.order == pb.ORDER_FIFO
    assert message.staleness_measure == pb.STALENESS_MEASURE_HEAD


def test_wire_and_domain_have_the_same_fields() -> None:
    assert {field.name for field in pb.RunPolicy.DESCRIPTOR.fields} == {field.name for field in fields(RunPolicy)}


# ── presets ──────────────────────────────────────────────────────────────────


def test_unset_fields_start_from_the_preset_and_set_ones_win() -> None:
    effective = policy(pb.RunPolicy(preset="areal(2)", batch_groups=10, overflow_action=pb.OVERFLOW_ACTION_REJECT))
    assert effective.preset == "areal(2)"
    assert (effective.max_lookahead, effective.max_staleness) == (2, 2)
    assert effective.max_queued_groups == 30
    assert effective.overflow_action is OverflowAction.REJECT
    assert effective.lease_ttl_ms == RunPolicy().lease_ttl_ms
    zero = policy(pb.RunPolicy(preset="areal(2)", max_staleness=0))
    assert zero.max_staleness == 0


def test_a_preset_is_that_of_its_fields() -> None:
    for name in ("sync", "miles", "prime_rl(1)", "streaming(4, 2)"):
        effective = policy(pb.RunPolicy(preset=name, batch_groups=64))
        named = fields_of(name, 64)
        assert {field: getattr(effective, field) for field in named} == named


def test_an_effective_policy_is_the_same_without_its_preset() -> None:
    effective = policy(pb.RunPolicy(preset="prime_rl(3)"))
    message = to_policy(effective)
    message.preset = ""
    bare = policy(message)
    assert {**bare.to_store(), "preset": effective.preset} == effective.to_store()


@pytest.mark.parametrize("name", ["nobody", "areal", "areal(x)", "sync(1)", "areal(1", "AREAL(1)"])
def test_an_unknown_preset_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidField) as error:
        policy(pb.RunPolicy(preset=name))
    assert error.value.attributes["field"] == "policy.preset"
    assert "miles" in error.value.attributes["limit"]


# ── refusals ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("values", "field", "limit"),
    [
        ({"order": 9}, "policy.order", "one of fifo, lifo, stalest_first, priority, submission"),
        ({"staleness_measure": 4}, "policy.staleness_measure", "one of head, mean, tail"),
        ({"overflow_action": 9}, "policy.overflow_action", "one of drop_oldest, block, reject"),
        ({"stale_action": 9}, "policy.stale_action", "one of drop, recycle"),
        ({"max_incarnations": 1_001}, "policy.max_incarnations", "between 0 and 1000"),
        ({"filter_min_mean_reward_milli": -(10**13)}, "policy.filter_min_mean_reward_milli", "between"),
        ({"min_acceptance_milli": 1_001}, "policy.min_acceptance_milli", "between 0 and 1000"),
        ({"micro_batch_groups": 70_000}, "policy.micro_batch_groups", "between"),
        ({"wait_replicas": 17}, "policy.wait_replicas", "between 0 and 16"),
        ({"max_unavailable_engines": 1_000_001}, "policy.max_unavailable_engines", "between 0 and 1000000"),
        ({"target_staleness_milli": 1_000_000_001}, "policy.target_staleness_milli", "between 0 and 1000000000"),
        ({"max_uses": 9}, "policy.max_uses", "between 1 and 8"),
        ({"reuse_share_milli": 7_001}, "policy.reuse_share_milli", "between 0 and 7000"),
        ({"target_measure": 3}, "policy.target_measure", "one of head, token"),
        ({"order_window_groups": 10_000_001}, "policy.order_window_groups", "between 0 and 10000000"),
        ({"stale_wait_ms": 3_600_001}, "policy.stale_wait_ms", "between 0 and 3600000"),
        ({"fresh_start_ms": 600_001}, "policy.fresh_start_ms", "between 0 and 600000"),
        ({"max_queued_groups": 0}, "policy.max_queued_groups", "unset for the default"),
        ({"stages": ["Values"]}, "policy.stages[0]", "1 to 32 characters of [a-z0-9_]"),
        ({"stages": ["values", "values"]}, "policy.stages[1]", "each stage once"),
        ({"stages": [f"s{i}" for i in range(9)]}, "policy.stages", "at most 8 stages"),
        (
            {"environments": [pb.EnvironmentRule(environment="e" * 65)]},
            "policy.environments[0].environment",
            "at most 64 characters",
        ),
        (
            {"environments": [pb.EnvironmentRule(environment="a", share=10_001)]},
            "policy.environments[a].share",
            "between 0 and 10000",
        ),
        (
            {"environments": [pb.EnvironmentRule(environment="a", starts_per_minute=0)]},
            "policy.environments[a].starts_per_minute",
            "between 1 and 1000000",
        ),
        (
            {"environments": [pb.EnvironmentRule(environment="a", start_burst=2)]},
            "policy.environments[a].start_burst",
            "unset without starts_per_minute",
        ),
        (
            {"environments": [pb.EnvironmentRule(environment="a", priority=256)]},
            "policy.environments[a].priority",
            "between 0 and 255",
        ),
        (
            {"environments": [pb.EnvironmentRule(environment="a"), pb.EnvironmentRule(environment="a")]},
            "policy.environments[a]",
            "each environment once",
        ),
        (
            {"environments": [pb.EnvironmentRule(environment=f"e{i}") for i in range(257)]},
            "policy.environments",
            "at most 256",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_out_of_bounds_is_named_with_its_limit(values: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidField) as error:
        policy(pb.RunPolicy(**values))
    assert error.value.attributes["field"] == field
    assert limit in error.value.attributes["limit"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cancel_stale_leases": True}, "cancel_stale_leases"),
        ({"quota_groups": 40}, "quota_groups"),
        ({"quota_tokens": 1 << 40}, "quota_tokens"),
        ({"filter_min_mean_reward_milli": 1, "filter_max_mean_reward_milli": 0}, "filter_max_mean_reward_milli"),
        ({"preset": "sync", "prefetch_batches": 1}, "max_staleness"),
    ],
    ids=str,
)
def test_a_policy_that_contradicts_itself_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPolicy) as error:
        policy(pb.RunPolicy(**values))
    assert error.value.attributes["field"] == field


# ── bounds of the service ────────────────────────────────────────────────────

BOUNDS = QuotaBounds(groups=256, tokens=1_000_000, bytes=1 << 30)


@pytest.mark.parametrize(
    ("values", "field", "limit"),
    [
        ({"quota_groups": 257}, "policy.quota_groups", "at most 256, the service's max_run_groups"),
        (
            {"quota_tokens": 1_000_001, "max_queued_tokens": 1_000},
            "policy.quota_tokens",
            "at most 1000000, the service's max_run_tokens",
        ),
        ({"quota_bytes": 1 << 31}, "policy.quota_bytes", f"at most {1 << 30}, the service's max_run_bytes"),
    ],
    ids=str,
)
def test_a_quota_above_the_services_bound_is_refused(values: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidField) as error:
        policy(pb.RunPolicy(**values), BOUNDS)
    assert error.value.attributes["field"] == field
    assert error.value.attributes["limit"] == limit


def test_a_policy_without_quotas_gets_the_services_bounds_and_is_not_refused_for_them() -> None:
    effective = policy(pb.RunPolicy(), BOUNDS)
    assert (effective.quota_groups, effective.quota_tokens, effective.quota_bytes) == (256, 1_000_000, 1 << 30)
    assert effective.max_queued_tokens == 500_000, "two batches fit: the one that is trained on, and the next"
    assert effective.max_queued_bytes == 1 << 29
    # As an operator's tool reads and writes it.
    assert policy(to_policy(effective), BOUNDS) == effective


def test_a_quota_below_the_services_bound_stays() -> None:
    effective = policy(pb.RunPolicy(quota_groups=100, quota_tokens=900, max_queued_tokens=400), BOUNDS)
    assert (effective.quota_groups, effective.quota_tokens) == (100, 900)
    assert effective.max_queued_tokens == 400


def test_a_queue_that_is_too_large_for_the_services_bound_is_refused() -> None:
    with pytest.raises(InvalidPolicy) as error:
        policy(pb.RunPolicy(max_queued_bytes=1 << 30), BOUNDS)
    assert error.value.attributes["field"] == "quota_bytes"
    with pytest.raises(InvalidPolicy) as error:
        policy(pb.RunPolicy(batch_groups=200), BOUNDS)
    assert error.value.attributes["field"] == "quota_groups"
    assert "the service's max_run_groups" in error.value.message


def test_unset_is_no_bound_and_zero_is_one() -> None:
    assert policy(pb.RunPolicy()).max_version_spread == UNSET
    assert policy(pb.RunPolicy(max_version_spread=0)).max_version_spread == 0
