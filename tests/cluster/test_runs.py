"""Runs spread over the shards of a cluster: the whole loop of each, and what concerns all of them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from buffer_service.domain.ports import Topic
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import UnknownRun
from tests.store.driver import Run, beside, emptied
from tests.support.store_cluster import StoreCluster

pytestmark = pytest.mark.timeout(60)

RUNS = 12


@pytest.fixture
async def store(shards: StoreCluster) -> AsyncIterator[RedisRunStore]:
    connected = await emptied(None, shards)
    yield connected
    await connected.close()


@pytest.fixture
async def runs(store: RedisRunStore) -> list[Run]:
    """Runs that exist, on every shard."""
    made = [Run(store, f"run-{number}") for number in range(RUNS)]
    for run in made:
        await run.create()
    return made


async def train_one(run: Run) -> None:
    await run.submit("a", "b")
    leases = (await run.lease(2)).grants
    for lease in leases:
        assert await run.push_kinds(run.group(lease, lease.task_id.encode())) == ["queued"]
    assert sorted(await run.bodies(await run.batch(0))) == [b"a", b"b"]
    await run.commit(0)
    await run.checkpoint(0)


async def check(*runs: Run) -> None:
    """Ledgers balance, and exactly the payloads exist that the runs know."""
    living = set[str]()
    await runs[0].store.sweep()
    for run in runs:
        groups = {name: amount.groups for name, amount in (await run.view()).groups.items()}
        assert groups.pop("accepted") == sum(groups.values())
        living |= await run.living_keys()
    assert await runs[0].payload_keys() == living


async def test_runs_on_every_shard_do_the_whole_loop(
    store: RedisRunStore, runs: list[Run], shards: StoreCluster
) -> None:
    assert {shards.shard_of(index_key(run.run_id, "run")) for run in runs} == {0, 1, 2}
    await asyncio.gather(*map(train_one, runs))
    await check(*runs)
    assert await store.list_runs() == sorted(run.run_id for run in runs)
    assert {(await run.view()).groups["trained"].groups for run in runs} == {2}


async def test_another_replica_finds_the_runs_and_deletes_them(
    store: RedisRunStore, runs: list[Run], shards: StoreCluster
) -> None:
    await asyncio.gather(*(run.fill("a", "b") for run in runs))
    other = await beside(store)
    assert len(await other.list_runs()) == RUNS
    for run in runs:
        await other.delete_run(run.run_id)
        with pytest.raises(UnknownRun):
            await run.view()
    await other.close()
    assert await store.list_runs() == []
    left = {key for keys in shards.keys("*rb*") for key in keys if not key.startswith(("rb:audited", "rb:replicated"))}
    assert left == {"{rb}:schema"}


async def test_what_is_waited_for_on_any_shard_is_heard(store: RedisRunStore, runs: list[Run]) -> None:
    other = await beside(store)

    async def heard(run: Run) -> bool:
        ticket = store.notifications.ticket(run.run_id, Topic.TASKS)
        waiting = asyncio.create_task(store.notifications.wait(run.run_id, Topic.TASKS, ticket, 10))
        await Run(other, run.run_id).submit("a")
        return await waiting > ticket

    assert all(await asyncio.gather(*map(heard, runs)))
    await other.close()


async def test_facts_are_of_all_shards(store: RedisRunStore, runs: list[Run]) -> None:
    facts = await store.facts()
    assert len(facts.payload_shards) == 3
    assert facts.memory_used_bytes >= sum(one.memory_used_bytes or 0 for one in facts.payload_shards) // 2
    assert (await runs[0].view()).payload_shards == 3
