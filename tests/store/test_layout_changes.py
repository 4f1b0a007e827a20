"""Services of different versions on one store: who may touch a run, and what an older run lacks."""

from typing import TYPE_CHECKING

import pytest

from buffer_service import commands
from buffer_service.commands.replies import pack, text, unpack
from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.store.keys import SCHEMA_VERSION, index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import LayoutChanged
from tests.store.driver import Run, beside
from tests.support.store_server import StoreServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NEXT = str(SCHEMA_VERSION + 1)


async def contents(run: Run) -> dict[str, bytes]:
    """Everything on the store, as it would be restored."""
    return {text(key): bytes(await run.command("DUMP", key)) for key in await run.command("KEYS", "*")}


async def test_a_run_of_another_layout_is_read_and_changed_by_nobody_who_does_not_know_it(run: Run) -> None:
    await run.create(record_groups=True)
    await run.submit("a", "b")
    grant = await run.one_lease()
    await run.command("HSET", index_key(run.run_id, "run"), "layout", NEXT)
    before = await contents(run)
    calls: list[Callable[[], Awaitable[object]]] = [
        run.view,
        lambda: run.lease(1),
        lambda: run.push(run.group(grant, b"a payload that is stored in the same transaction")),
        lambda: run.give_back(grant, partial_rollout=b"so far"),
        lambda: run.short(0),
        lambda: run.store.call(commands.update_policy(run.run_id, RunPolicy())),
        lambda: run.store.delete_run(run.run_id),
        run.store.sweep,
        lambda: run.store.call(commands.evaluations(run.run_id)),
    ]
    for call in calls:
        with pytest.raises(LayoutChanged) as refusal:
            await call()
        assert refusal.value.attributes == {"found": NEXT, "known": str(SCHEMA_VERSION)}
        assert await contents(run) == before
    # For what every test of a run looks at in the end.
    await run.command("HSET", index_key(run.run_id, "run"), "layout", SCHEMA_VERSION)


async def test_a_run_of_another_layout_does_not_hold_up_the_sweep_of_the_others(run: Run) -> None:
    await run.create()
    other = Run(run.store, f"{run.run_id}-of-a-later-name")
    await other.create(lease_ttl_ms=1_000)
    await other.submit("a")
    await other.one_lease()
    await other.pass_ms(2_000)
    record = index_key(run.run_id, "run")
    await run.command("HSET", record, "layout", NEXT)
    with pytest.raises(LayoutChanged):
        await run.store.sweep()
    assert (await other.view()).tasks["leased"] == 0
    await run.command("HSET", record, "layout", SCHEMA_VERSION)


async def test_a_service_whose_store_was_taken_over_says_so_and_creates_no_run(store: RedisRunStore, run: Run) -> None:
    await store.check_layout()
    await run.command("SET", run.names[1], NEXT)
    before = await contents(run)
    for call in (store.check_layout, lambda: store.create_run("another", RunPolicy())):
        with pytest.raises(LayoutChanged, match=f"version {NEXT} by now .* knows version {SCHEMA_VERSION}"):
            await call()
    assert await contents(run) == before


async def test_a_store_that_was_emptied_gets_the_layout_again(server: StoreServer, store: RedisRunStore) -> None:
    server.flush()
    run = Run(store)
    await run.create()
    assert int(await run.command("GET", run.names[1])) == SCHEMA_VERSION


async def test_a_run_whose_policy_lacks_later_fields_gets_them_with_their_defaults(
    server: StoreServer, run: Run
) -> None:
    await run.create(batch_groups=2, max_staleness=3)
    record = index_key(run.run_id, "run")
    whole = unpack(await run.command("HGET", record, "policy"))
    later = {
        b"record_groups",
        b"wait_replicas",
        b"wait_timeout_ms",
        b"max_unavailable_engines",
        b"fresh_start_ms",
        b"stale_wait_ms",
        b"order_window_groups",
        b"longest_first",
        b"stages",
        b"max_uses",
        b"reuse_share_milli",
        b"reuse_max_staleness",
    }
    older = {name: value for name, value in whole.items() if name not in later}
    await run.command("HSET", record, "policy", pack(older)[1:])  # without the array that arguments are in

    newer = Run(await beside(run.store))
    await newer.submit("a", "b")
    await newer.push(*[newer.group(grant) for grant in (await newer.lease(2)).grants])
    await newer.batch(0)
    view = await newer.view()
    await newer.store.close()

    assert view.policy == RunPolicy(batch_groups=2, max_staleness=3)
    assert view.groups["delivered"].groups == 2
    assert unpack(await run.command("HGET", record, "policy")) == whole


async def test_a_ledger_that_lacks_later_states_has_nothing_in_them(run: Run) -> None:
    await run.create(batch_groups=2)
    await run.fill("a", "b")
    record = index_key(run.run_id, "run")
    ledger = unpack(await run.command("HGET", record, "ledger"))
    del ledger[b"groups"][b"rejected"]
    await run.command("HSET", record, "ledger", pack(ledger)[1:])
    view = await run.view()
    assert (view.groups["rejected"], view.groups["queued"].groups) == (ops.Amount(), 2)
    assert all("rejected" in groups for groups in view.environments.values())
    await run.batch(0)
    await run.store.call(commands.reject(run.run_id, ops.Reject(run.term, 0, ["a/0"], "")))
    assert (await run.view()).groups["rejected"].groups == 1
