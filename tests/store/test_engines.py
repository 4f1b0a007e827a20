"""Engines on the store: what is kept of reports, permits of engines that load, who is forgotten, collective plans."""

from dataclasses import replace
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import Topic
from buffer_service.store.keys import index_key
from buffer_wire.errors import RunPaused, StaleTerm, StoreRolledBack, VersionConflict
from tests.store.driver import Run, claim, weights

HOUR_MS = 3_600_000
PERMIT_MS = 60_000


def report(engine_id: str, state: str = "ready", **fields: Any) -> ops.EngineReport:
    return ops.EngineReport(engine_id, "w", state, weights(0), 0, 0, "", 0, **fields)


async def tell(run: Run, engine_id: str, state: str = "ready", **fields: Any) -> bool:
    """Tell whether the engine may load."""
    return (await run.store.call(commands.report_engine(run.run_id, report(engine_id, state, **fields)))).may_load


async def ask(run: Run, engine_id: str, state: str = "ready") -> bool:
    return await tell(run, engine_id, state, wants_load=True)


async def limit(run: Run, engines: int) -> None:
    policy = replace((await run.view()).policy, max_unavailable_engines=engines)
    await run.store.call(commands.update_policy(run.run_id, policy))


async def known(run: Run) -> list[str]:
    return [engine.engine_id for engine in (await run.view()).engines]


# ── reports ──────────────────────────────────────────────────────────────────


async def test_a_view_says_how_long_each_engine_has_been_silent(run: Run) -> None:
    await run.create()
    given = report(
        "a",
        membership=(1 << 64) - 1,
        prepared=weights(7, 3),
        weights_url="http://w:1",
        weights_from="there",
        running_samples=3,
        kv_usage_milli=500,
        moved_samples=7,
    )
    await run.store.call(commands.report_engine(run.run_id, given))
    await run.pass_ms(5_000)
    await tell(run, "b")
    await run.pass_ms(20)
    assert (await run.view()).engines == [replace(given, silent_ms=5_020), report("b", silent_ms=20)]


async def test_a_report_that_says_nothing_new_ends_the_silence_and_no_more(run: Run) -> None:
    await run.create()
    await tell(run, "a")
    before = await run.view()
    await run.pass_ms(5_000)
    await tell(run, "a")
    assert await run.view() == before


# ── permits ───────────────────────────────────────────────────────────────────


async def test_as_many_engines_may_load_at_once_as_the_policy_says(run: Run) -> None:
    await run.create(max_unavailable_engines=2)
    assert [await ask(run, name) for name in "abc"] == [True, True, False]
    assert await ask(run, "a", "loading")
    assert not await tell(run, "b")
    assert await ask(run, "c")
    assert [await ask(run, name) for name in "bac"] == [False, True, True]


async def test_the_engine_that_has_waited_longest_goes_first(run: Run) -> None:
    await run.create(max_unavailable_engines=1)
    assert [await ask(run, name) for name in "abc"] == [True, False, False]
    await tell(run, "a")
    await run.pass_ms(1)
    assert [await ask(run, name) for name in "acb"] == [False, False, True]
    await run.pass_ms(1)
    await tell(run, "b")
    assert [await ask(run, name) for name in "bac"] == [False, False, True]


async def test_an_engine_that_stopped_asking_holds_nobody_up(run: Run) -> None:
    await run.create(max_unavailable_engines=1)
    assert [await ask(run, name) for name in "abcd"] == [True, False, False, False]
    await tell(run, "b")
    await run.pass_ms(5_000)
    assert not await ask(run, "d")
    await tell(run, "a")
    assert not await ask(run, "d")
    await run.pass_ms(1)
    assert not await ask(run, "c"), "its turn was over, so it stands behind d"
    assert await ask(run, "d")


async def test_a_place_lapses_when_its_engine_says_nothing_for_a_minute(run: Run) -> None:
    await run.create(max_unavailable_engines=1)
    await ask(run, "a")
    await run.pass_ms(40_000)
    assert await ask(run, "a", "loading")
    await run.pass_ms(PERMIT_MS)
    assert not await ask(run, "b")
    assert not (await run.store.call(commands.weights(run.run_id))).may_load
    await run.pass_ms(1)
    assert (await run.store.call(commands.weights(run.run_id))).may_load
    assert await ask(run, "b")
    assert not await ask(run, "a", "loading")


@pytest.mark.parametrize("state", ["starting", "quarantined", "stopped"])
async def test_an_engine_that_does_not_serve_needs_no_place_and_has_none(run: Run, state: str) -> None:
    await run.create(max_unavailable_engines=1)
    await ask(run, "a")
    assert await ask(run, "b", state)
    assert await ask(run, "a", state)
    assert await ask(run, "c")


async def test_without_a_limit_every_engine_may_load_and_holds_nothing(run: Run) -> None:
    await run.create()
    assert [await ask(run, name) for name in "abc"] == [True] * 3
    assert await tell(run, "a")
    await limit(run, 1)
    assert not await tell(run, "a")
    assert await ask(run, "d")


async def test_a_lower_limit_takes_no_place_back(run: Run) -> None:
    await run.create(max_unavailable_engines=2)
    assert [await ask(run, name) for name in "ab"] == [True, True]
    await limit(run, 1)
    assert [await ask(run, name, "loading") for name in "ab"] == [True, True]
    await tell(run, "a")
    assert not await ask(run, "c")
    await tell(run, "b")
    assert await ask(run, "c")


async def test_who_waits_for_a_place_is_told_when_one_is_free_or_the_limit_rises(run: Run) -> None:
    await run.create(max_unavailable_engines=1)
    await ask(run, "a")
    notifications = run.store.notifications
    for change in (tell(run, "a"), limit(run, 2)):
        ticket = notifications.ticket(run.run_id, Topic.WEIGHTS)
        await change
        assert await notifications.wait(run.run_id, Topic.WEIGHTS, ticket, 10) > ticket
        await ask(run, "a")


# ── silence ──────────────────────────────────────────────────────────────────


async def test_an_engine_that_is_silent_for_over_an_hour_is_forgotten_with_its_place(run: Run) -> None:
    await run.create(max_unavailable_engines=1)
    await ask(run, "a")
    await run.pass_ms(1)
    await tell(run, "b")
    await run.pass_ms(HOUR_MS)
    revision = (await run.view()).revision
    assert await run.store.sweep() == 1
    assert (await known(run), (await run.view()).revision) == (["b"], revision + 1)
    assert await run.command("EXISTS", index_key(run.run_id, "permits")) == 0
    await tell(run, "a")
    assert await known(run) == ["a", "b"]


async def test_the_sweep_forgets_engines_and_workers_in_portions(run: Run) -> None:
    await run.create()
    for number in range(600):
        await tell(run, f"e{number}")
        await run.lease(worker=f"w{number}")
    await run.pass_ms(HOUR_MS + 1)
    assert await run.store.sweep() == 1_200
    assert await known(run) == []
    for name in ("engines", "engines_heard", "workers", "workers_heard"):
        assert await run.command("EXISTS", index_key(run.run_id, name)) == 0


async def test_a_worker_that_asks_for_nothing_for_an_hour_is_forgotten_unless_it_holds_a_lease(run: Run) -> None:
    await run.create(lease_ttl_ms=HOUR_MS)
    await run.submit("a", "b")
    await run.lease(worker="idle")
    await run.give_back(*(await run.lease(worker="idle", request_id="r")).grants, worker="idle")
    held = await run.one_lease(worker="busy", request_id="r")
    await run.pass_ms(HOUR_MS)
    await run.store.sweep()
    assert await run.record("workers", "idle") is not None
    await run.store.call(commands.extend(run.run_id, "busy", "i", [held.lease_id]))
    await run.pass_ms(1)
    await run.store.sweep()
    assert await run.record("workers", "idle") is None
    again = (await run.lease(worker="busy", request_id="r")).grants
    assert [grant.lease_id for grant in again] == [held.lease_id]


# ── collective plans ─────────────────────────────────────────────────────────


async def planned(run: Run) -> bytes:
    return (await run.store.call(commands.weights(run.run_id))).plan


async def announce(run: Run, version: int, plan: bytes = b"plan", term: int | None = None, seen: int = 0) -> int:
    request = ops.PlanCollective(run.term if term is None else term, version, plan)
    return await run.store.call(commands.plan_collective(run.run_id, request, seen_revision=claim(seen)))


async def test_a_plan_is_watched_until_its_version_is_published(run: Run) -> None:
    await run.create()
    assert await announce(run, 3) == 2
    assert await announce(run, 3) == 2
    await run.publish(2)
    assert await planned(run) == b"plan"
    await announce(run, 3, b"next phase")
    await run.publish(3)
    assert await planned(run) == b""
    await announce(run, 4)
    await run.publish(7)
    assert await planned(run) == b""


async def test_a_repeated_publish_of_an_older_version_leaves_the_plan_alone(run: Run) -> None:
    await run.create()
    await run.publish(1)
    await announce(run, 2)
    await run.publish(1)
    assert await planned(run) == b"plan"


async def test_a_plan_can_be_replaced_by_one_of_another_version(run: Run) -> None:
    await run.create()
    await announce(run, 5)
    await announce(run, 2, b"lower")
    await run.publish(2)
    assert await planned(run) == b""


async def test_a_resume_ends_the_plan(run: Run) -> None:
    await run.create()
    await announce(run, 1)
    await run.resume()
    assert await planned(run) == b""
    with pytest.raises(StaleTerm):
        await announce(run, 1, term=1)
    await announce(run, 1)
    assert await planned(run) == b"plan"


async def test_a_plan_of_what_is_published_is_refused(run: Run) -> None:
    await run.create()
    await run.publish(4)
    for version in (3, 4):
        with pytest.raises(VersionConflict):
            await announce(run, version)
    assert await planned(run) == b""


async def test_a_plan_is_announced_while_an_operator_holds_the_run_but_not_on_a_store_that_was_rolled_back(
    run: Run,
) -> None:
    await run.create()
    await run.store.call(commands.pause_run(run.run_id))
    revision = await announce(run, 1)
    with pytest.raises(StoreRolledBack):
        await announce(run, 1, b"next phase", seen=revision + 1)
    with pytest.raises(RunPaused):
        await announce(run, 1, b"next phase")


async def test_a_plan_is_told_to_those_who_watch(run: Run) -> None:
    await run.create()
    notifications = run.store.notifications
    ticket = notifications.ticket(run.run_id, Topic.WEIGHTS)
    await announce(run, 1)
    assert await notifications.wait(run.run_id, Topic.WEIGHTS, ticket, 10) > ticket


async def test_nothing_is_left_of_engines_and_plans_of_a_deleted_run(run: Run) -> None:
    await run.create(max_unavailable_engines=1)
    await announce(run, 1)
    await ask(run, "a")
    await run.lease()
    await run.store.delete_run(run.run_id)
    assert await run.command("KEYS", index_key(run.run_id, "*")) == []
