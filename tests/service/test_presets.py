"""Presets through a running service: what is created by name has the fields, behaves by them, and can be overridden."""

from typing import Any

import pytest

from buffer_service.domain.presets import PRESETS, fields_of
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2, tasks_pb2
from tests.support.rpc import Rpc, RunRpc, failure, make_group, make_task

N = 2


def shown(policy: runs_pb2.RunPolicy) -> dict[str, Any]:
    """The fields of an effective policy, actions by their names."""
    values: dict[str, Any] = {}
    for field, value in policy.ListFields():
        kind = field.enum_type
        values[field.name] = kind.values_by_number[value].name.partition("ACTION_")[2].lower() if kind else value
    return values


def leased(run: RunRpc, loaded: int = 0) -> list[tasks_pb2.Lease]:
    weights = common_pb2.WeightVersion(term=1, version=loaded)
    return list(run.lease(max_tasks=50, loaded=weights).leases)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_created_by_name_has_the_presets_fields(rpc: Rpc, name: str) -> None:
    numbers = {"areal": "(4)", "queue_drop": "(3)", "queue_max": "(4)", "streaming": "(2)"}
    text = name + numbers.get(name, "")
    effective = shown(rpc.create(preset=text, batch_groups=8).get().policy)
    expected = fields_of(text, 8)
    assert {field: effective[field] for field in expected} == expected


def test_fields_that_are_set_override_the_preset(rpc: Rpc) -> None:
    run = rpc.create(
        preset="areal(4)",
        batch_groups=N,
        max_inflight_groups=3,
        max_staleness=9,
        overflow_action=runs_pb2.OVERFLOW_ACTION_REJECT,
    )
    policy = run.get().policy
    assert (policy.preset, policy.max_lookahead, policy.max_queued_groups) == ("areal(4)", 4, 10)
    assert (policy.max_inflight_groups, policy.max_staleness) == (3, 9)
    assert policy.overflow_action == runs_pb2.OVERFLOW_ACTION_REJECT
    run.submit([make_task(f"t{i}") for i in range(20)])
    assert len(leased(run)) == 3, "AReaL's max_concurrent is the smaller cap"


def test_areal_gives_capacity_by_its_formula(rpc: Rpc) -> None:
    run = rpc.create(preset="areal(1)", batch_groups=N, max_inflight_groups=100)
    run.submit([make_task(f"t{i}") for i in range(20)])
    first = leased(run)
    assert len(first) == (1 + 0 + 1) * N
    for lease in first:
        run.push_one(make_group(lease.task.task_id, lease_id=lease.lease_id))
    run.pull(0, wait_ms=10_000)
    assert leased(run) == []
    run.publish(1, commit_through_step=0)
    assert len(leased(run, loaded=1)) == (1 + 1 + 1) * N - len(first)


def test_sync_gives_stale_engines_nothing(rpc: Rpc) -> None:
    run = rpc.create(preset="sync", batch_groups=N)
    run.submit([make_task(f"t{i}") for i in range(8)])
    for lease in leased(run):
        run.push_one(make_group(lease.task.task_id, lease_id=lease.lease_id))
    run.pull(0, wait_ms=10_000)
    run.publish(1, commit_through_step=0)
    assert leased(run, loaded=0) == []
    assert len(leased(run, loaded=1)) == N


def test_queue_drop_keeps_the_newest(rpc: Rpc) -> None:
    run = rpc.create(preset="queue_drop(2)", batch_groups=N)
    run.fill(6)
    _, delivered = run.pull(0)
    assert [item.group.header.task_id for item in delivered] == ["x2", "x3"]
    assert run.get().groups.dropped_overflow.groups == 2


def test_streaming_delivers_in_micro_batches(rpc: Rpc) -> None:
    run = rpc.create(preset="streaming(1)", batch_groups=N)
    run.fill(1)
    assert not run.pull(0)[0].final
    run.fill(1, prefix="y")
    assert run.pull(0, micro_batch=1)[0].final


def test_miles_docs_recycles(rpc: Rpc) -> None:
    run = rpc.create(preset="miles_docs(0)", batch_groups=N)
    run.submit([make_task("t")])
    (lease,) = leased(run)
    assert run.push_one(make_group("t", lease_id=lease.lease_id)).outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    run.publish(1)
    error = failure(lambda: run.pull(0))
    assert error.reason == "batch_not_ready"
    assert run.get().groups.recycled.groups == 1
    (again,) = leased(run, loaded=1)
    assert (again.task.task_id, again.incarnation) == ("t", 1)


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do(rpc: Rpc) -> None:
    error = failure(lambda: rpc.create(preset="queue_drop(0)"))
    assert error.reason == "invalid_field"
    assert "queue_drop(factor 1 to 1,000)" in error.attributes["limit"]
    assert all(name in error.attributes["limit"] for name in PRESETS)
