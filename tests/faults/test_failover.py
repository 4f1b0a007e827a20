"""The death of the store's primary under load, with Sentinels that promote its replica."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from buffer_service.commands import note_client
from buffer_service.domain import ops
from buffer_service.domain.ports import Topic
from buffer_service.store.primary import FAILOVER_PATIENCE_S
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import NotReplicated, StoreRolledBack, StoreUnavailable, StoreUnsuitable
from tests.faults.load import BATCH_GROUPS, Load
from tests.store.driver import RUN, Run
from tests.support.sentinels import SERVICE, Deployment, Server, sentinels

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

TIMEOUT_S = 50.0
WORKERS = 6
SOME = 60
"""Groups that make a load."""


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with sentinels() as running:
        yield running


@asynccontextmanager
async def load(deployment: Deployment, **policy: int) -> AsyncIterator[Load]:
    """A new run, and two replicas of the service on its store."""
    stores = [await RedisRunStore.connect(deployment.url, timeout_s=TIMEOUT_S) for _ in range(2)]
    runs = [Run(store) for store in stores]
    try:
        await runs[0].create(batch_groups=BATCH_GROUPS, max_queued_groups=10_000, **policy)
        yield Load(runs)
    finally:
        for store in stores:
            await store.close()


async def finish(load: Load, workers: list[asyncio.Task[None]], trainer: asyncio.Task[None]) -> None:
    """No new groups but those that make the last batch whole; the trainer gets them all."""
    load.enough = True
    await asyncio.gather(*workers)
    for number in range(-len(set(load.acknowledged)) % BATCH_GROUPS):
        await load.push(f"last{number}")
    await load.until(lambda: len(load.delivered()) >= len(set(load.acknowledged)), "every group is delivered", trainer)
    load.all_delivered = True
    await trainer


async def check_ledger(load: Load) -> ops.RunView:
    view = await load.replicas[0].view()
    amounts = {name: amount.groups for name, amount in view.groups.items()}
    assert amounts.pop("accepted") == sum(amounts.values()), amounts
    return view


async def refused(load: Load, more: int, *busy: asyncio.Task[None]) -> None:
    """Wait until so many more writes were not acknowledged for lack of replicas."""
    enough = load.interruptions.count(NotReplicated.reason) + more
    await load.until(lambda: load.interruptions.count(NotReplicated.reason) >= enough, "waits fail", *busy)


async def test_with_wait_replicas_a_failover_loses_nothing_and_delivers_nothing_twice(deployment: Deployment) -> None:
    async with load(deployment, wait_replicas=1, wait_timeout_ms=100) as running:
        workers = [asyncio.create_task(running.work(number)) for number in range(WORKERS)]
        trainer = asyncio.create_task(running.train())
        await running.until(lambda: len(running.acknowledged) > SOME, "a load", *workers, trainer)
        deployment.cut_off()
        await refused(running, WORKERS, *workers, trainer)
        before = len(running.acknowledged)
        await refused(running, WORKERS, *workers, trainer)
        assert len(running.acknowledged) == before
        deployment.primary.kill()
        deployment.replica.go_on()
        await deployment.promoted()
        # It has no replica: still nothing is acknowledged.
        await refused(running, WORKERS, *workers, trainer)
        assert len(running.acknowledged) == before
        await deployment.primary_back()
        await running.until(lambda: len(running.acknowledged) > before + SOME, "it goes on", *workers, trainer)
        await finish(running, workers, trainer)
        assert running.ended_by == []
        assert sorted(running.delivered()) == sorted(running.acknowledged)
        view = await check_ledger(running)
        assert (view.paused, view.groups["trained"].groups) == ("", len(running.acknowledged))


async def test_without_wait_replicas_what_a_failover_loses_is_reported_and_the_run_goes_on_after_a_resume(
    deployment: Deployment,
) -> None:
    async with load(deployment) as running:
        workers = [asyncio.create_task(running.work(number)) for number in range(WORKERS)]
        trainer = asyncio.create_task(running.train())
        await running.until(lambda: len(running.acknowledged) > SOME, "a load", *workers, trainer)
        deployment.cut_off()
        before = list(running.acknowledged)
        await running.until(lambda: len(running.acknowledged) > len(before) + SOME, "more load", *workers, trainer)
        deployment.primary.kill()
        deployment.replica.go_on()
        # Everybody who works on the run is told, and nobody is told anything else.
        await asyncio.wait_for(asyncio.gather(*workers, trainer), 90)
        assert len(running.ended_by) == WORKERS + 1
        assert any(isinstance(error, StoreRolledBack) for error in running.ended_by)
        view = await check_ledger(running)
        assert view.paused == "store_rolled_back"
        await resume_and_finish(running, before)


async def resume_and_finish(running: Load, before: list[str]) -> None:
    """A trainer takes the run over, workers push again what they had: each group is in one batch in the end."""
    promised = set(running.acknowledged)
    resumed = await running.replicas[0].resume()
    for run in running.replicas:
        run.term = resumed.term
    running.batches = {step: tasks for step, tasks in running.batches.items() if step < resumed.next_step}
    running.ended_by.clear()
    lost = []
    trainer = asyncio.create_task(running.train(resumed.next_step))
    for task in sorted(promised):
        accepted = (await running.replicas[0].view()).groups["accepted"].groups
        await running.push(task)
        if (await running.replicas[0].view()).groups["accepted"].groups > accepted:
            lost.append(task)
    # The replica cannot have had more than what was on its way when it was cut off.
    assert len(lost) >= SOME // 2
    assert set(lost) <= promised - set(before[:-SOME])
    await finish(running, [], trainer)
    assert running.ended_by == []
    assert max(Counter(running.delivered()).values()) == 1
    assert set(running.delivered()) >= promised
    assert (await check_ledger(running)).paused == ""


async def test_a_planned_failover_is_followed_and_nothing_is_lost(deployment: Deployment) -> None:
    async with load(deployment, wait_replicas=1) as running:
        workers = [asyncio.create_task(running.work(number)) for number in range(WORKERS)]
        trainer = asyncio.create_task(running.train())
        await running.until(lambda: len(running.acknowledged) > SOME, "a load", *workers, trainer)
        assert "+OK" in deployment.sentinels[0].ask(f"SENTINEL FAILOVER {SERVICE}")
        await deployment.promoted()
        before = len(running.acknowledged)
        # The former primary is a replica of the new one by itself.
        await running.until(lambda: len(running.acknowledged) > before + SOME, "it goes on", *workers, trainer)
        await finish(running, workers, trainer)
        assert running.ended_by == []
        assert sorted(running.delivered()) == sorted(running.acknowledged)
        assert (await check_ledger(running)).paused == ""


async def test_a_primary_that_goes_silent_is_left_as_soon_as_the_sentinels_name_another(
    deployment: Deployment,
) -> None:
    """Silence as when its host is gone: no connection ends, none is answered."""
    async with load(deployment) as running:
        run = running.replicas[0]
        await run.fill("before")
        notifications = run.store.notifications
        seen = notifications.ticket(run.run_id, Topic.GROUPS)
        deployment.primary.halt()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="the primary is now"):
            await run.push(run.group("silent"))
        # The time-out for an answer is the double, also where the Sentinels split their votes and elect again.
        assert time.monotonic() - began < TIMEOUT_S / 2
        await deployment.promoted()
        # Whoever waits checks again.
        assert await notifications.wait(run.run_id, Topic.GROUPS, seen, 5) > seen
        await running.push("after")
        assert await run.ledger() == {"accepted": 2, "queued": 2}
        seen = notifications.ticket(run.run_id, Topic.GROUPS)
        await running.push("second")
        await running.push("third")
        assert await notifications.wait(run.run_id, Topic.GROUPS, seen, 5) > seen
        deployment.primary.go_on()


async def test_without_a_primary_calls_say_so_in_time(deployment: Deployment) -> None:
    store = await RedisRunStore.connect(deployment.url, timeout_s=10)
    for server in (deployment.primary, deployment.replica, *deployment.sentinels):
        server.kill()
    with pytest.raises(StoreUnavailable):
        await store.list_runs()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="Sentinels name no primary that works"):
        await store.list_runs()
    assert time.monotonic() - began < 5 * FAILOVER_PATIENCE_S
    # Everybody who asks meanwhile is told by the same attempt.
    outcomes = await asyncio.gather(*(store.list_runs() for _ in range(20)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    assert time.monotonic() - began < 10 * FAILOVER_PATIENCE_S
    await store.close()
    with pytest.raises(StoreUnavailable):
        await RedisRunStore.connect(deployment.url)


async def test_a_sentinel_that_is_silent_is_passed_over(deployment: Deployment) -> None:
    deployment.sentinels[0].halt()
    began = time.monotonic()
    store = await RedisRunStore.connect(deployment.url, timeout_s=10)
    assert list(await store.list_runs()) == []
    assert time.monotonic() - began < 5
    await store.close()


async def test_a_promoted_replica_that_evicts_is_refused(deployment: Deployment) -> None:
    store = await RedisRunStore.connect(deployment.url, timeout_s=10)
    deployment.replica.ask("CONFIG SET maxmemory-policy allkeys-lru")
    deployment.primary.kill()
    await deployment.promoted()
    with pytest.raises(StoreUnsuitable, match="maxmemory-policy is allkeys-lru"):
        await until_answered(store)
    deployment.replica.ask("CONFIG SET maxmemory-policy noeviction")
    assert await until_answered(store) == []
    await store.close()


async def until_answered(store: RedisRunStore) -> list[str]:
    deadline = time.monotonic() + 20
    while True:
        try:
            return list(await store.list_runs())
        except StoreUnavailable:
            assert time.monotonic() < deadline


async def test_users_for_payloads_are_made_again_on_the_promoted_server(deployment: Deployment) -> None:
    """The former primary never told its replica of them."""
    store = await RedisRunStore.connect(deployment.url, timeout_s=TIMEOUT_S)
    try:
        await Run(store).create()
        noted = await store.call(note_client(RUN, ops.Direction.READ, "trainer", ""))
        before = await store.payload_user(RUN, ops.Direction.READ, noted)
        assert (await login(deployment.primary, before)).startswith("+OK")
        assert "-WRONGPASS" in await login(deployment.replica, before)
        deployment.primary.kill()
        await deployment.promoted()
        noted = await store.call(note_client(RUN, ops.Direction.READ, "trainer", ""))
        after = await store.payload_user(RUN, ops.Direction.READ, noted)
        assert (await store.payload_place()).port == deployment.replica.port
        assert (after.name, after.password) == (before.name, before.password)
        assert (await login(deployment.replica, after)).startswith("+OK")
    finally:
        await store.close()


async def login(server: Server, user: ops.StoreUser) -> str:
    """The server's answer."""
    return await asyncio.to_thread(server.ask, f"AUTH {user.name} {user.password}")
