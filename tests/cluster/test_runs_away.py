"""Runs on a cluster whose shards die, or give slots away, while groups are pushed and trained on."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from buffer_service.domain.ports import Topic
from buffer_service.store.keys import IN_CLUSTER, index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import RunPaused, StoreRolledBack, StoreUnavailable
from buffer_wire.resp.slots import slot_of
from tests.cluster.traffic import Traffic
from tests.store.driver import Run, emptied
from tests.support.store_cluster import StoreCluster, store_cluster

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cluster() -> Iterator[StoreCluster]:
    with store_cluster() as running:
        yield running


def run_on(store: RedisRunStore, cluster: StoreCluster, shard: int) -> Run:
    """A run, not made yet, whose index lies on a shard."""
    names = (f"run-{number}" for number in range(1_000))
    return Run(store, next(name for name in names if cluster.shard_of(index_key(name, "run")) == shard))


async def test_a_replica_that_has_everything_takes_over_and_the_run_goes_on() -> None:
    with store_cluster(replicas=2) as cluster:
        run = run_on(await emptied(None, cluster), cluster, 1)
        await run.create(batch_groups=8, max_queued_groups=100_000, wait_replicas=1, wait_timeout_ms=2_000)
        traffic = Traffic(run, cluster)
        async with traffic.flowing():
            await traffic.until_acknowledged(100)
            traffic.longest_s.clear()
            killed = cluster.kill(1)
            await asyncio.to_thread(cluster.until_promoted, 1)
            await traffic.until_acknowledged(100)
        ledger = await traffic.balance()
        print(f"longest pauses {dict(traffic.longest_s)}, errors {dict(traffic.retried)}, {ledger}")
        assert max(traffic.longest_s.values()) < 6
        assert traffic.paused == {""}
        assert "lost" not in ledger
        cluster.restart(killed)
        await run.store.sweep()
        # A push that was cut off between payload and decision has left its payload staged.
        assert await run.payload_keys() == await run.living_keys() | set(await run.members("staging"))
        await run.store.close()


async def test_a_replica_that_lags_is_found_out_and_one_resume_settles_it(cluster: StoreCluster) -> None:
    store = await emptied(None, cluster)
    run, other = run_on(store, cluster, 1), run_on(store, cluster, 2)
    for each in (run, other):
        await each.create(max_queued_groups=100_000)
    await run.fill(*(f"before-{number}" for number in range(20)))
    (slow,) = cluster.replicas(1)
    await asyncio.to_thread(cluster.until_whole)
    cluster.freeze(slow)
    cluster.primary(1).do("CLIENT", "KILL", "TYPE", "replica")
    await run.fill(*(f"gone-{number}" for number in range(20)))
    cluster.kill(1)
    cluster.thaw(slow)
    began = time.monotonic()
    # Its index lies elsewhere; payloads may lie on the shard that is away.
    await other.view()
    assert time.monotonic() - began < 0.5
    await asyncio.to_thread(cluster.until_promoted, 1)
    with pytest.raises(StoreRolledBack):
        await run.push(run.group("after-0"))
    with pytest.raises(RunPaused):
        await run.push(run.group("after-0"))
    assert (await other.view()).paused == ""
    await run.resume()
    await run.fill("after-0", "after-1")
    trained = 0
    for step in range(40):
        if (await run.view()).groups["queued"].groups < 2:
            break
        batch = await run.batch(step)
        gone = [
            group.group_id
            for group, body in zip(batch.shard, await run.bodies(batch), strict=True)
            if body == b"(gone)"
        ]
        if gone:
            await run.lose(step, *gone)
            batch = await run.batch(step)
        await run.commit(step)
        trained += len(batch.shard)
    amounts = {name: amount.groups for name, amount in (await run.view()).groups.items()}
    assert amounts.pop("accepted") == sum(amounts.values())
    assert amounts["trained"] == trained >= 20
    await store.close()


async def test_slots_of_runs_move_and_nobody_notices(cluster: StoreCluster) -> None:
    run = run_on(await emptied(None, cluster), cluster, 1)
    await run.create(batch_groups=8, max_queued_groups=100_000)
    slot = slot_of(index_key(run.run_id, "run"))
    traffic = Traffic(run, cluster)
    async with traffic.flowing():
        for to in (2, 0, 1):
            await traffic.until_acknowledged(100)
            await asyncio.to_thread(cluster.migrate, slot, slot, to)
        await traffic.until_acknowledged(100)
    ledger = await traffic.balance()
    print(f"longest pauses {dict(traffic.longest_s)}, errors {dict(traffic.retried)}, {ledger}")
    assert max(traffic.longest_s.values()) < 1
    assert not traffic.retried
    assert not traffic.trainer_met
    assert traffic.paused == {""}
    assert "lost" not in ledger
    await run.check()
    await run.store.close()


async def test_a_script_under_which_a_slot_moved_key_by_key_pauses_its_run(cluster: StoreCluster) -> None:
    run = run_on(await emptied(None, cluster), cluster, 1)
    await run.create()
    await run.fill("a")
    slot = slot_of(index_key(run.run_id, "run"))
    source, target = cluster.primary(1), cluster.primary(2)
    target.do("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.do("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)

    def move(*keys: str) -> None:
        source.do("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *keys)

    move(index_key(run.run_id, "queue"))
    with pytest.raises(StoreUnavailable, match=f"run {run.run_id} is paused"):
        await run.push(run.group("b"))
    with pytest.raises(StoreRolledBack):
        await run.push(run.group("b"))
    while keys := source.do("CLUSTER", "GETKEYSINSLOT", slot, 100):
        move(*(key.decode() for key in keys))
    for node in (target, source, cluster.primary(0)):
        node.do("CLUSTER", "SETSLOT", slot, "NODE", target.id)
    assert (await run.view()).paused == "store_rolled_back"
    await run.resume()
    await run.fill("b")
    assert sorted(await run.bodies(await run.batch(0))) == [b"body-a", b"body-b"]
    await run.store.close()


async def test_a_primary_that_answers_nothing_any_more_is_left_and_runs_elsewhere_are_swept(
    cluster: StoreCluster,
) -> None:
    """The list of runs lies on it: what sweeps know of it goes on, and who listens there listens elsewhere."""
    listed = cluster.shard_of(IN_CLUSTER.runs)
    store = await emptied(None, cluster)
    other = run_on(store, cluster, (listed + 1) % 3)
    await other.create(lease_ttl_ms=1_000, retry_backoff_ms=0)
    await other.submit("a")
    await other.one_lease()
    await store.sweep()
    cluster.freeze(cluster.primary(listed))
    await other.pass_ms(1_500)
    ticket = store.notifications.ticket(other.run_id, Topic.TASKS)
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(20):
            await store.sweep()
    assert (await other.tasks())["pending"] == 1
    assert await store.notifications.wait(other.run_id, Topic.TASKS, ticket, 20) > ticket
    await asyncio.to_thread(cluster.until_promoted, listed)
    await store.sweep()
    await store.close()
