"""Shards that die, come back, freeze or give slots away while groups are pushed and trained on."""

import asyncio
import os
import time

import pytest

from buffer_service.store.transport.replication import Wanted
from buffer_wire.errors import NotReplicated, StoreUnavailable
from tests.cluster.traffic import Traffic, spread
from tests.store.driver import Run, emptied
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.support.store_server import StoreServer

pytestmark = pytest.mark.timeout(600)

KILLS = int(os.environ.get("RB_TEST_KILLS", "2"))


async def test_a_primary_dies_and_the_run_goes_on(index: StoreServer) -> None:
    with store_cluster(replicas=1) as cluster:
        run = Run(await emptied(index, cluster))
        # So many that some lie in the queue when their shard dies.
        await run.create(batch_groups=90, max_queued_groups=100_000)
        traffic = Traffic(run, cluster)
        async with traffic.flowing():
            await traffic.until_acknowledged(100)
            traffic.longest_s.clear()
            # It lags: what is written now it does not have when it is promoted.
            (slow,) = cluster.replicas(1)
            cluster.freeze(slow)
            cluster.primary(1).do("CLIENT", "KILL", "TYPE", "replica")
            await traffic.until_acknowledged(50)
            killed = cluster.kill(1)
            cluster.thaw(slow)
            await asyncio.to_thread(cluster.until_promoted, 1)
            await traffic.until_acknowledged(20, pusher=1)
            # A batch is complete with those that are lost now.
            await traffic.until_acknowledged(200)
        ledger = await traffic.balance()
        print(f"longest pauses {dict(traffic.longest_s)}, errors {dict(traffic.retried)}, {ledger}")
        assert 1 < traffic.longest_s[1] < 5
        assert max(traffic.longest_s[0], traffic.longest_s[2]) < 0.5
        assert traffic.retried.keys() <= {1}
        assert traffic.paused == {""}
        assert ledger["lost"] == traffic.lost > 0
        cluster.restart(killed)
        await run.store.sweep()
        assert await run.payload_keys() == await run.living_keys()
        await run.store.close()


async def test_a_primary_that_answers_nothing_any_more_is_left_for_its_replica(index: StoreServer) -> None:
    """Its connections live, as when its host is gone: only the other nodes can tell."""
    with store_cluster(replicas=1) as cluster:
        run = Run(await emptied(index, cluster))
        await run.create(batch_groups=8, max_queued_groups=100_000)
        traffic = Traffic(run, cluster)
        async with traffic.flowing():
            await traffic.until_acknowledged(100)
            traffic.longest_s.clear()
            frozen = cluster.primary(1)
            cluster.freeze(frozen)
            await asyncio.to_thread(cluster.until_promoted, 1)
            await traffic.until_acknowledged(20, pusher=1)
            # What it still takes for true when it goes on is nobody's business.
            cluster.thaw(frozen)
            await traffic.until_acknowledged(100)
        ledger = await traffic.balance()
        print(f"longest pauses {dict(traffic.longest_s)}, errors {dict(traffic.retried)}, {ledger}")
        assert 1 < traffic.longest_s[1] < 8
        assert max(traffic.longest_s[0], traffic.longest_s[2]) < 0.5
        assert traffic.paused == {""}
        await run.store.close()


async def test_with_replicas_waited_for_nothing_acknowledged_is_lost(index: StoreServer) -> None:
    with store_cluster(replicas=2) as cluster:
        run = Run(await emptied(index, cluster))
        # The index has no replicas: only payload servers are waited for.
        await run.create(batch_groups=8, max_queued_groups=100_000)
        traffic, ledger = Traffic(run, cluster), dict[str, int]()
        waited_for(run, 1)
        for kill in range(KILLS):
            shard = kill % 3
            async with traffic.flowing():
                await traffic.until_acknowledged(50)
                slow, _ = cluster.replicas(shard)
                # It lacks what is written now; the other one connects again. Of the two Valkey promotes the one with
                # more.
                cluster.freeze(slow)
                cluster.primary(shard).do("CLIENT", "KILL", "TYPE", "replica")
                await traffic.until_acknowledged(50)
                killed = cluster.kill(shard)
                cluster.thaw(slow)
                await asyncio.to_thread(cluster.until_promoted, shard)
                await traffic.until_acknowledged(100)
            ledger = await traffic.balance()
            assert "lost" not in ledger, (kill, ledger)
            assert traffic.paused == {""}
            cluster.restart(killed)
        print(f"{KILLS} kills, {ledger}, longest pauses {dict(traffic.longest_s)}")
        await run.store.close()


async def test_no_push_is_acknowledged_that_too_few_replicas_have(index: StoreServer) -> None:
    with store_cluster(replicas=1, node_timeout_ms=20_000) as cluster:
        run = Run(await emptied(index, cluster))
        await run.create(batch_groups=8)
        waited_for(run, 1, timeout_ms=300)
        assert await run.push_kinds(*(run.group(f"a{number}") for number in range(9))) == ["queued"] * 9
        (slow,) = cluster.replicas(1)
        cluster.freeze(slow)
        with pytest.raises(NotReplicated):
            await run.push(*spread(run, cluster, {f"b{number}": b"body" for number in range(9)}))
        written = await run.write(run.group("c"))
        while cluster.shard_of(run.key_of(written)) != 1:
            written = await run.write(run.group("c"))
        with pytest.raises(NotReplicated):
            await run.push(written)
        # Nor is a deletion forgotten.
        await run.batch(0)
        await run.publish(1, commit_through=0)
        await run.checkpoint(0)
        left = await run.command("SCARD", f"rb:{{{run.run_id}}}:trash")
        assert left > 0
        cluster.thaw(slow)
        assert await run.push_kinds(written) == ["queued"]
        await run.store.sweep()
        assert await run.command("SCARD", f"rb:{{{run.run_id}}}:trash") == 0
        await run.store.close()


def waited_for(run: Run, replicas: int, timeout_ms: int = 2_000) -> None:
    """Have payload servers waited for, and the index, which has no replica, not."""

    async def wanted(_run_id: str) -> Wanted:
        return Wanted(replicas, timeout_ms)

    run.store._connection.wanted = wanted  # type: ignore[method-assign,assignment]


async def test_slots_move_under_load_and_no_caller_sees_it(index: StoreServer) -> None:
    with store_cluster(replicas=1) as cluster:
        run = Run(await emptied(index, cluster))
        await run.create(batch_groups=8, max_queued_groups=100_000)
        traffic = Traffic(run, cluster)
        first, last, _ = cluster.slots()[0]
        async with traffic.flowing():
            await traffic.until_acknowledged(100)
            traffic.longest_s.clear()
            await asyncio.to_thread(cluster.migrate, first, last, 2)
            await traffic.until_acknowledged(200)
            await asyncio.to_thread(cluster.migrate, first, first + 2_000, 1)
            await traffic.until_acknowledged(200)
        ledger = await traffic.balance()
        print(f"longest pauses {dict(traffic.longest_s)}, errors {dict(traffic.retried)}, {ledger}")
        assert traffic.retried == {}
        assert max(traffic.longest_s.values()) < 1
        assert "lost" not in ledger
        await run.store.close()


async def test_what_lies_on_a_shard_that_is_away_is_waited_for_by_name(index: StoreServer) -> None:
    """Not lost, and deleted once it is back; what lies on other shards comes and goes."""
    with store_cluster(replicas=0) as cluster:
        run = Run(await emptied(index, cluster))
        await run.create(batch_groups=12)
        await run.push(*spread(run, cluster, {f"t{number}": b"body-%d" % number for number in range(12)}))
        others = spread(run, cluster, {f"u{number}": b"body" for number in range(12)})
        await run.batch(0)
        by_shard = dict(enumerate(cluster.keys()))
        assert all(by_shard.values())
        killed = cluster.kill(1)
        for shard, keys in by_shard.items():
            began = time.monotonic()
            if shard == 1:
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{killed.port}"):
                    await run.store.fetch(run.run_id, sorted(keys))
                assert time.monotonic() - began < 3
            else:
                assert None not in await run.store.fetch(run.run_id, sorted(keys))
                assert time.monotonic() - began < 0.5
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{killed.port}"):
            await run.push(*others)
        # What the others took of that push is deleted at once.
        assert living(cluster) == [by_shard[0], by_shard[2]]

        await run.publish(1, commit_through=0)
        await run.checkpoint(0)
        assert await run.ledger() == {"accepted": 12, "trained": 12}
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{killed.port}"):
            await run.store.sweep()
        assert living(cluster) == [set(), set()]
        trash = {key.decode() for key in await run.command("SMEMBERS", f"rb:{{{run.run_id}}}:trash")}
        assert trash == by_shard[1]
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{killed.port}"):
            await run.store.delete_run(run.run_id)
        assert await run.store.list_runs() == []

        facts = {one.server: one.memory_used_bytes for one in (await run.store.facts()).payload_shards}
        assert [server for server, used in facts.items() if used is None] == [f"127.0.0.1:{killed.port}"]
        assert len(facts) == 3

        # It keeps nothing over its end.
        cluster.restart(killed)
        await run.store.sweep()
        assert await run.command("KEYS", "rb:{*") == []
        await run.store.close()


def living(cluster: StoreCluster) -> list[set[str]]:
    """Keys on the shards that are not away."""
    return [{key.decode() for key in cluster.primary(shard).do("KEYS", "*")} for shard in (0, 2)]
