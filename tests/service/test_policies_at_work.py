"""Tests of what a run's policy makes of tasks and groups, as its workers and its trainer see it over the wire."""

from collections import Counter
from typing import Any

import pytest

from rollout_buffer.v1 import batches_pb2, groups_pb2, runs_pb2, tasks_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure, make_group, make_task, version

QUEUED, FILTERED = groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_FILTERED


def pulled(run: RunRpc, step: int, **fields: Any) -> list[str]:
    return [item.group.header.task_id for item in run.pull(step, wait_ms=10_000, **fields)[1]]


# ── presets ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preset", ["sync", "one_step_off", "miles", "areal(4)", "prime_rl(2)", "queue_drop(2)"])
def test_a_run_of_a_preset_trains(rpc: Rpc, preset: str) -> None:
    run = rpc.create(preset=preset, batch_groups=2)
    assert run.get().policy.preset == preset
    run.submit([make_task(f"t{i}") for i in range(8)])
    for step in range(3):
        for lease in run.lease(max_tasks=2, loaded=version(step)).leases:
            group = make_group(lease.task.task_id, lease_id=lease.lease_id, version=version(step))
            assert run.push_one(group).outcome == QUEUED
        assert len(pulled(run, step)) == 2
        run.publish(step + 1, commit_through_step=step)
    state = run.get()
    assert state.groups.trained.groups == 6
    assert state.groups.balanced


def test_the_same_preset_is_the_same_policy(rpc: Rpc) -> None:
    run = rpc.create(preset="areal( 4 )", batch_groups=2)
    request = runs_pb2.CreateRunRequest(run_id=run.run_id, policy=run.get().policy)
    assert not rpc.runs.CreateRun(request, timeout=TIMEOUT_S).created
    assert run.get().policy.preset == "areal(4)"


def test_an_unknown_preset_is_refused(rpc: Rpc) -> None:
    error = failure(lambda: rpc.create(preset="nobody"))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "policy.preset")


# ── environments ─────────────────────────────────────────────────────────────


def test_leases_and_batches_are_divided_by_the_environments_shares(rpc: Rpc) -> None:
    rules = [
        runs_pb2.EnvironmentRule(environment="math", share=3),
        runs_pb2.EnvironmentRule(environment="code", share=1),
    ]
    run = rpc.create(batch_groups=8, max_queued_groups=64, environments=rules)
    run.submit([make_task(f"{name}{i}", environment=name) for name in ("code", "math") for i in range(16)])
    leases = run.lease(max_tasks=16).leases
    assert Counter(lease.task.environment for lease in leases) == {"math": 12, "code": 4}
    run.push([make_group(f"x{name}{i}", environment=name) for name in ("code", "math") for i in range(8)])
    _, delivered = run.pull(0)
    assert Counter(item.group.header.environment for item in delivered) == {"math": 6, "code": 2}
    ledgers = {entry.environment: entry.groups for entry in run.get().environments}
    assert ledgers.keys() == {"code", "math"}
    assert (ledgers["math"].delivered.groups, ledgers["math"].queued.groups) == (6, 2)
    assert all(ledger.balanced for ledger in ledgers.values())


def test_the_order_of_batches_changes_with_the_policy(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=8)
    run.fill(3)
    assert pulled(run, 0) == ["x0"]
    request = runs_pb2.UpdatePolicyRequest(
        run=run.ref, policy=runs_pb2.RunPolicy(batch_groups=1, max_queued_groups=8, order=runs_pb2.ORDER_LIFO)
    )
    rpc.runs.UpdatePolicy(request, timeout=TIMEOUT_S)
    assert pulled(run, 1) == ["x2"]


# ── filter ───────────────────────────────────────────────────────────────────


def test_groups_that_teach_nothing_are_filtered_and_counted(rpc: Rpc) -> None:
    run = rpc.create(
        batch_groups=2,
        filter_equal_rewards=True,
        filter_min_response_tokens=3,
        filter_max_response_tokens=20,
        filter_max_mean_reward_milli=700,
    )
    cases = [
        (make_group("equal", rewards=(1.0, 1.0)), FILTERED),
        (make_group("short", lengths=(3, 9), rewards=(0.0, 1.0)), FILTERED),
        (make_group("long", lengths=(22, 9), rewards=(0.0, 1.0)), FILTERED),
        (make_group("easy", rewards=(0.5, 1.0)), FILTERED),
        (make_group("kept", rewards=(0.4, 1.0)), QUEUED),
    ]
    acks = run.push([group for group, _ in cases])
    assert [ack.outcome for ack in acks] == [outcome for _, outcome in cases]
    assert acks[0].group_id == "equal/0"
    state = run.get()
    assert state.groups.filtered.groups == 4
    assert state.groups.accepted.groups == 5
    assert state.groups.balanced
    statistics = state.statistics
    assert (statistics.filtered_equal_rewards, statistics.filtered_response_tokens) == (1, 2)
    assert statistics.filtered_mean_reward == 1
    assert 0 < statistics.recent_acceptance_ppm < 1_000_000
    assert run.push_one(cases[0][0]).outcome == groups_pb2.PUSH_OUTCOME_DUPLICATE


def test_a_pull_that_a_filter_starves_says_so(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, filter_equal_rewards=True, min_acceptance_milli=500)
    run.submit([make_task("a")])
    run.lease()
    run.push([make_group(f"x{i}") for i in range(64)])
    waits_on = failure(lambda: run.pull(0)).attributes["waits_on"]
    assert waits_on == "the filter: 64% of the recent groups are filtered (so far 64 for equal_rewards)"


# ── staleness in flight ──────────────────────────────────────────────────────


def test_a_lease_that_can_no_longer_be_fresh_is_cancelled_by_its_heartbeat(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_staleness=1, cancel_stale_leases=True, max_queued_groups=8)
    run.submit([make_task("a")])
    lease_id = run.lease().leases[0].lease_id
    request = tasks_pb2.ExtendLeasesRequest(
        run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, lease_ids=[lease_id]
    )
    assert list(rpc.tasks.ExtendLeases(request, timeout=TIMEOUT_S).states) == [tasks_pb2.LEASE_STATE_LIVE]
    run.publish(2)
    assert list(rpc.tasks.ExtendLeases(request, timeout=TIMEOUT_S).states) == [tasks_pb2.LEASE_STATE_CANCELLED]
    assert list(rpc.tasks.ExtendLeases(request, timeout=TIMEOUT_S).states) == [tasks_pb2.LEASE_STATE_LOST]
    state = run.get()
    assert state.statistics.leases_cancelled == 1
    assert state.tasks.pending == 1


def test_the_gate_can_go_by_the_mean_version(rpc: Rpc) -> None:
    run = rpc.create(
        batch_groups=1, max_queued_groups=4, max_staleness=1, staleness_measure=runs_pb2.STALENESS_MEASURE_MEAN
    )
    run.publish(3)
    mixed = make_group("mixed", lengths=(11,))
    del mixed.header.samples[0].spans[:]
    mixed.header.samples[0].spans.add(version=version(0), start=1, end=3)
    mixed.header.samples[0].spans.add(version=version(3), start=3, end=11)
    old = make_group("old", lengths=(11,), version=version(1))
    run.push([old, mixed])
    # (2 x 0 + 8 x 3) / 10 = 2.4, at most 1 behind version 3; the other is 2 behind.
    assert pulled(run, 0) == ["mixed"]
    assert run.get().groups.dropped_stale.groups == 1


# ── micro-batches ───────────────────────────────────────────────────────────────────


def test_a_step_is_pulled_in_micro_batches_as_its_groups_come(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=6, micro_batch_groups=2, max_queued_groups=8)
    run.fill(2, prefix="a")
    info, delivered = run.pull(0)
    assert (info.step, info.micro_batch, info.final, info.total_groups, len(delivered)) == (0, 0, False, 2, 2)
    state = run.get()
    assert (state.groups.forming.groups, state.next_step) == (2, 0)
    error = failure(lambda: run.pull(0, micro_batch=1))
    assert error.attributes["needed_groups"] == "2"
    assert error.attributes["waits_on"] == "the feeder: no task is pending; micro-batch 1 of step 0 needs 2 groups"
    run.fill(4, prefix="b")
    second, _ = run.pull(0, micro_batch=1)
    assert (second.micro_batch, second.final, second.total_groups) == (1, False, 4)
    last, _ = run.pull(0, micro_batch=2)
    assert (last.micro_batch, last.final, last.total_groups) == (2, True, 6)
    again, same = run.pull(0)
    assert again.replayed
    assert (again.total_groups, [item.sequence for item in same]) == (2, [item.sequence for item in delivered])
    state = run.get()
    assert (state.groups.delivered.groups, state.next_step) == (6, 1)
    assert run.commit(0).committed_steps == 1


def test_micro_batches_are_split_over_the_ranks(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=8, micro_batch_groups=2, max_queued_groups=8, equal_shards=True)
    run.fill(8)
    seen: list[str] = []
    for number in range(2):
        for rank in range(2):
            shard = pulled(run, 0, rank=rank, world_size=2, micro_batch=number)
            assert len(shard) == 2
            seen += shard
    assert sorted(seen) == sorted(f"x{i}" for i in range(8))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"micro_batch": 2}, "micro_batch"),
        ({"batch_groups": 0}, "batch_groups"),
        ({"batch_groups": 70_000}, "batch_groups"),
        ({"world_size": 5}, "world_size"),
        ({"train_version": 1 << 43}, "train_version"),
    ],
    ids=str,
)
def test_a_pull_that_makes_no_sense_names_its_field(rpc: Rpc, fields: dict[str, Any], field: str) -> None:
    run = rpc.create(batch_groups=16, micro_batch_groups=2, max_queued_groups=8)
    run.fill(4)
    before = run.get()
    error = failure(lambda: run.pull(0, **fields))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", field)
    assert error.attributes["limit"]
    assert run.get() == before


def test_a_step_may_have_a_size_of_its_own(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=8)
    run.fill(8)
    info, _ = run.pull(0, batch_groups=5)
    assert (info.total_groups, info.final, info.micro_batch) == (5, True, 0)
    assert len(pulled(run, 1)) == 2


def test_a_batch_ends_before_it_exceeds_its_tokens(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=8, max_queued_groups=16, batch_tokens=100)
    run.push([make_group(f"x{i}", lengths=(40,)) for i in range(4)])
    info, _ = run.pull(0)
    assert (info.total_groups, info.total_tokens) == (2, 80)


# ── recordings ───────────────────────────────────────────────────────────────


def export(run: RunRpc, **fields: Any) -> list[runs_pb2.Record]:
    request = runs_pb2.ExportRecordsRequest(run=run.ref, **fields)
    return [record for message in run.rpc.runs.ExportRecords(request, timeout=TIMEOUT_S) for record in message.records]


def test_a_recording_tells_what_happened_to_every_group(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=2, record_groups=True, filter_equal_rewards=True)
    kept = [make_group(f"x{i}", rewards=(0.0, 1.0), environment="math") for i in range(3)]
    run.push([kept[0], make_group("equal"), *kept[1:]])
    run.pull(0)
    run.commit(0)
    records = export(run, include_groups=True)
    accepted = {record.accepted.group_id: record.accepted for record in records if record.HasField("accepted")}
    assert {group_id: item.state for group_id, item in accepted.items()} == {
        "x0/0": "queued",
        "equal/0": "filtered",
        "x1/0": "queued",
        "x2/0": "queued",
    }
    assert list(accepted["x0/0"].response_lengths) == [3, 5]
    assert list(accepted["x0/0"].rewards) == [0.0, 1.0]
    assert accepted["x0/0"].environment == "math"
    assert accepted["x1/0"].group == kept[1]
    moved = [(record.moved.group_id, record.moved.state) for record in records if record.HasField("moved")]
    assert moved == [("x0/0", "dropped_overflow")]
    (closed,) = [record.micro_batch for record in records if record.HasField("micro_batch")]
    assert (closed.step, closed.micro_batch, list(closed.group_ids)) == (0, 0, ["x1/0", "x2/0"])
    (trained,) = [record.trained for record in records if record.HasField("trained")]
    assert trained.committed_steps == 1
    ids = [record.event_id for record in records]
    assert [record.event_id for record in export(run, after=ids[2])] == ids[3:]
    assert export(run, after=ids[-1]) == []


def test_a_recording_has_the_rewards_of_trajectories(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, record_groups=True)
    rows = make_group("rows", lengths=(4, 4, 4, 4), rewards=(0.0, 1.0, 0.25, 9.0))
    for sample, trajectory in zip(rows.header.samples, (1, 1, 2, 2), strict=True):
        sample.trajectory = trajectory
    rows.header.samples[3].trainable, rows.header.samples[3].loss_tokens = False, 0
    acks = run.push([make_group("plain", rewards=(0.0, 1.0)), rows])
    assert [ack.outcome for ack in acks] == [groups_pb2.PUSH_OUTCOME_QUEUED] * 2, acks
    plain, of_rows = [record.accepted for record in export(run) if record.HasField("accepted")]
    assert (list(plain.rewards), list(plain.trajectory_rewards)) == ([0.0, 1.0], [])
    assert (list(of_rows.rewards), list(of_rows.trajectory_rewards)) == ([0.0, 1.0, 0.25, 9.0], [0.5, 0.25])


def test_a_run_that_records_nothing_has_nothing_to_export(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    run.fill(1)
    assert export(run) == []
    error = failure(lambda: export(run, after="yesterday"))
    assert error.attributes["field"] == "after"


def test_a_resume_tells_where_a_streamed_step_goes_on(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4, micro_batch_groups=2, max_queued_groups=8)
    run.fill(4)
    _, first = run.pull(0)
    reply = run.resume(mode=batches_pb2.RESUME_MODE_REPLAY)
    assert (reply.next_step, reply.next_unassembled_step) == (0, 0)
    info, again = run.pull(0)
    assert info.replayed
    assert [item.sequence for item in again] == [item.sequence for item in first]
    assert run.pull(0, micro_batch=1)[0].final
