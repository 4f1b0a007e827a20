"""Creating, viewing and changing runs."""

from dataclasses import replace
from typing import TYPE_CHECKING

import msgpack
import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import (
    EnvironmentRule,
    Order,
    OverflowAction,
    RunPolicy,
    StaleAction,
    StalenessMeasure,
)
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import InvalidPolicy, PolicyChanged, RunExists, StaleTerm, StoreFault, UnknownRun
from buffer_wire.revision import Revision
from tests.oracle.rules.proofs import prove
from tests.store.driver import Run, weights

if TYPE_CHECKING:
    from buffer_service.domain.ports import RunStore


async def test_the_store_is_what_the_rest_of_the_service_asks_for(store: RedisRunStore) -> None:
    port: RunStore = store
    assert list(await port.list_runs()) == []


async def test_a_new_run_stands_at_its_beginning(run: Run) -> None:
    view = await run.create()
    assert (view.revision, view.term, view.published) == (1, 1, weights(0))
    assert (view.next_step, view.committed_steps, view.checkpointed_steps, view.cursor) == (0, 0, 0, 0)
    assert (view.world_size, view.paused, view.created_ms) == (0, "", run.now)
    assert set(view.groups) >= {"accepted", "queued", "trained"}
    assert set(view.groups.values()) == {ops.Amount()}
    assert set(view.tasks.values()) == {0}
    assert {name: value for name, value in view.statistics.items() if value} == {"recent_acceptance_ppm": 1_000_000}
    assert (view.draining, view.environments) == (False, {})


async def test_creating_again_with_the_same_policy_returns_the_run(store: RedisRunStore) -> None:
    _, first = await store.create_run("r", RunPolicy(batch_groups=3))
    view, again = await store.create_run("r", RunPolicy(batch_groups=3))
    assert (first, again, view.revision) == (True, False, 1)


async def test_creating_again_with_another_policy_names_the_differences(store: RedisRunStore) -> None:
    await store.create_run("r", RunPolicy(batch_groups=3))
    with pytest.raises(RunExists) as refusal:
        await store.create_run("r", RunPolicy(batch_groups=3, max_attempts=2, lease_ttl_ms=2000))
    assert refusal.value.attributes["differs"] == "lease_ttl_ms,max_attempts"


async def test_every_field_of_a_policy_is_kept(store: RedisRunStore) -> None:
    policy = RunPolicy(
        batch_groups=2,
        max_queued_groups=8,
        max_queued_tokens=1 << 50,
        max_queued_bytes=1 << 50,
        overflow_action=OverflowAction.BLOCK,
        max_staleness=7,
        stale_action=StaleAction.RECYCLE,
        reserve_queue_space=True,
        max_lookahead=3,
        failure_budget=0,
        order=Order.PRIORITY,
        environments=(
            EnvironmentRule(environment="math", share=3),
            EnvironmentRule(environment="\N{SNOWMAN}", priority=0),
        ),
        staleness_measure=StalenessMeasure.MEAN,
        filter_min_mean_reward_milli=-5,
        equal_shards=True,
        record_groups=True,
    )
    view, _ = await store.create_run("r", policy)
    assert view.policy == policy


async def test_environments_have_ledgers_of_their_own(run: Run) -> None:
    await run.create(max_queued_groups=4)
    await run.fill("a", "b", environment="math", tokens=7)
    await run.fill("c", environment="code", tokens=5)
    await run.batch(0)
    await run.commit(0)
    environments = (await run.view()).environments
    assert set(environments) == {"math", "code"}
    assert environments["math"]["accepted"] == environments["math"]["trained"] == ops.Amount(2, 8, 14, 12)
    assert environments["math"]["queued"] == environments["math"]["lost"] == ops.Amount()
    assert environments["code"]["queued"] == ops.Amount(1, 4, 5, 6)
    await run.check()


async def test_runs_are_listed_in_order(store: RedisRunStore) -> None:
    for run_id in ("b", "c", "a"):
        await store.create_run(run_id, RunPolicy())
    assert list(await store.list_runs()) == ["a", "b", "c"]


async def test_every_operation_refuses_an_unknown_run_and_writes_nothing(store: RedisRunStore, run: Run) -> None:
    group = run.group("t")
    lease = ops.LeaseGrant("t/0/1", "t", 0, 1, b"", b"")
    attempts = [
        run.view(),
        run.lease(),
        store.call(commands.extend(run.run_id, "w", "i", ["t/0/1"])),
        run.give_back(lease, partial_rollout=b"some"),
        run.push(group),
        store.retry_push(run.run_id, [(group.facts, "rb:p:x:0:4")]),
        run.pull(0),
        store.call(commands.report_lost(run.run_id, 1, 0, ["key"])),
        run.commit(0),
        run.publish(1),
        run.checkpoint(0),
        run.resume(),
        store.call(commands.weights(run.run_id)),
        store.call(commands.update_policy(run.run_id, RunPolicy())),
        store.call(commands.pause_run(run.run_id)),
        store.call(commands.drain_run(run.run_id)),
        store.call(commands.continue_run(run.run_id)),
        store.delete_run(run.run_id),
        store.records(run.run_id, "", 10),
    ]
    for attempt in attempts:
        with pytest.raises(UnknownRun):
            await attempt
    assert await run.command("KEYS", "*rb*") == [run.names[1].encode()]


async def test_a_run_that_vanished_from_the_store_leaves_no_payload_behind(run: Run) -> None:
    await run.create()
    await run.fill("a")
    await run.command("FLUSHALL")
    with pytest.raises(UnknownRun):
        await run.push(run.group("b"))
    assert await run.command("KEYS", "rb:*") == []


async def test_a_changed_policy_raises_the_revision_once(run: Run) -> None:
    await run.create()
    changed = RunPolicy(batch_groups=3, failure_budget=2)
    assert await run.store.call(commands.update_policy(run.run_id, changed)) == 2
    assert await run.store.call(commands.update_policy(run.run_id, changed)) == 2
    assert (await run.view()).policy == changed


async def test_a_policy_that_others_have_changed_is_not_replaced(run: Run) -> None:
    await run.create()
    first = (await run.view()).policy
    second = replace(first, failure_budget=2, environments=(EnvironmentRule(environment="a", share=2),))
    await run.store.call(commands.update_policy(run.run_id, second, first))
    before = await run.view()
    for expected in (first, replace(second, environments=())):
        with pytest.raises(PolicyChanged, match=run.run_id):
            await run.store.call(commands.update_policy(run.run_id, first, expected))
    assert await run.view() == before
    await run.store.call(commands.update_policy(run.run_id, first, second))
    assert (await run.view()).policy == first


async def test_a_field_that_an_older_service_did_not_store_is_not_taken_for_changed(run: Run) -> None:
    await run.create()
    first = (await run.view()).policy
    record = index_key(run.run_id, "run")
    stored = msgpack.unpackb(await run.command("HGET", record, "policy"))
    del stored["max_unavailable_engines"]
    await run.command("HSET", record, "policy", msgpack.packb(stored))
    changed = replace(first, max_unavailable_engines=2)
    await run.store.call(commands.update_policy(run.run_id, changed, first))
    assert (await run.view()).policy == changed


async def test_the_measure_of_staleness_changes_only_while_nothing_is_queued(run: Run) -> None:
    await run.create()
    await run.fill("a")
    by_mean = RunPolicy(batch_groups=2, staleness_measure=StalenessMeasure.MEAN)
    with pytest.raises(InvalidPolicy, match="while 1 groups are queued"):
        await run.store.call(commands.update_policy(run.run_id, by_mean))
    view = await run.view()
    assert (view.policy.staleness_measure, view.revision) == (StalenessMeasure.HEAD, 2)
    await run.fill("b")
    await run.batch(0)
    await run.store.call(commands.update_policy(run.run_id, by_mean))
    assert (await run.view()).policy == by_mean


async def test_a_repeated_policy_with_environments_changes_nothing(run: Run) -> None:
    policy = RunPolicy(batch_groups=2, environments=(EnvironmentRule(environment="a", share=2),))
    await run.create()
    assert await run.store.call(commands.update_policy(run.run_id, policy)) == 2
    assert await run.store.call(commands.update_policy(run.run_id, policy)) == 2


async def test_engines_are_listed_in_order_and_a_repeat_changes_nothing(run: Run) -> None:
    await run.create()
    reports = [
        ops.EngineReport("e2", "w", "ready", weights(3), 1, 20, "", 0),
        ops.EngineReport("e1", "w", "quarantined", weights(2), 2, 30, "broken", 4),
    ]
    for report in reports:
        await run.store.call(commands.report_engine(run.run_id, report))
    reported = await run.store.call(commands.report_engine(run.run_id, reports[1]))
    assert reported == ops.EngineReported(Revision(3), weights(0), may_load=True)
    assert list((await run.view()).engines) == [reports[1], reports[0]]


async def test_a_ledger_that_went_wrong_shows_in_the_view(run: Run) -> None:
    await run.create()
    await run.fill("a", "b")
    await run.command("ZREM", index_key(run.run_id, "q:0:env"), f"{1:015d}")
    view = await run.view()
    assert view.groups["accepted"].groups == 2
    assert view.groups["queued"].groups == 1


async def test_an_illegal_transition_is_refused_by_the_script(run: Run) -> None:
    await run.create()
    await run.submit("a")
    await run.one_lease()
    task = await run.record("tasks", "a") | {b"state": b"cancelled"}
    packed = msgpack.packb(task, use_bin_type=False)
    await run.command("HSET", index_key(run.run_id, "tasks"), "a", packed)
    await run.pass_ms(60_001)
    with pytest.raises(StoreFault, match="illegal transition of a task: cancelled to pending"):
        await run.store.sweep()


async def test_a_trainer_of_a_deleted_run_is_fenced_off_the_next_one_of_its_name(run: Run) -> None:
    policy = RunPolicy(batch_groups=2)
    seen = []
    for secret in ("of the first", "of the second"):
        await run.store.create_run(run.run_id, policy, secret=secret)
        # The same term, groups and step.
        assert (await run.resume(0)).term == 2
        await run.fill("a", "b")
        await run.batch(0)
        seen.append(prove(secret, (await run.view()).revision))
        if secret == "of the first":
            await run.store.delete_run(run.run_id)
    former, present = seen
    with pytest.raises(StaleTerm, match="deleted run"):
        await run.store.call(commands.commit(run.run_id, 2, 0, seen_revision=former))
    with pytest.raises(StaleTerm, match="deleted run"):
        await run.store.call(commands.publish(run.run_id, ops.Publish(2, 1, b"", None), seen_revision=former))
    assert (await run.view()).committed_steps == 0
    assert (await run.store.call(commands.commit(run.run_id, 2, 0, seen_revision=present)))[1] == 1


async def test_tasks_of_runs_of_one_name_have_ids_of_their_own(run: Run) -> None:
    ids: list[str] = []
    for seconds in (1_700_000_000, 1_700_000_001):
        await run.store.create_run(run.run_id, RunPolicy(batch_groups=2), revision=seconds * 1_000_000)
        ids += (await run.submit("", "")).task_ids
        lease = await run.one_lease()
        assert await run.push_kinds(run.group(lease)) == ["queued"]
        await run.check()
        await run.store.delete_run(run.run_id)
    assert len(set(ids)) == 4
