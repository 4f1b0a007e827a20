"""The service dies between any two of its steps: what is left is found by the sweep, and by the audit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops.groups import STAGING_AGE_MS
from buffer_service.domain.policy import OverflowAction
from buffer_service.store.keys import audited_key, index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreRolledBack, StoreUnavailable
from buffer_wire.payloads.keys import PART_BYTES, group_checksum, new_nonce, payload_checksum, payload_key
from rollout_buffer.v1 import groups_pb2
from tests.store.driver import Run, beside, emptied
from tests.support.store_cluster import StoreCluster
from tests.support.store_server import StoreServer, store_server

pytestmark = pytest.mark.timeout(120)

Act: TypeAlias = Callable[[Run], Awaitable[Any]]


class Death:
    """A process that stops for good at its n-th step: before it, or when the step is done and its answer is not."""

    def __init__(self, store: RedisRunStore, at: int, *, after: bool) -> None:
        self.steps = 0
        self.came = asyncio.Event()
        self._at, self._after = at, after
        assert store._shards is not None
        for owner, name in (
            (store._connection, "run"),
            (store._connection, "command"),
            (store._shards, "run"),
        ):
            self._cut(owner, name)

    def _cut(self, owner: Any, name: str) -> None:
        step = getattr(owner, name)

        async def mortal(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            dies = self.steps == self._at
            if dies and not self._after:
                await self._die()
            outcome = await step(*args, **kwargs)
            if dies:
                await self._die()
            return outcome

        setattr(owner, name, mortal)

    async def _die(self) -> None:
        self.came.set()
        await asyncio.Future()


@pytest.fixture
async def store(index: StoreServer, shards: StoreCluster) -> AsyncIterator[RedisRunStore]:
    connected = await emptied(index, shards)
    yield connected
    await connected.close()


def real(run: Run, task_id: str, **facts: Any) -> ops.NewGroup:
    """A group whose bytes name its task, as the audit reads it."""
    header = groups_pb2.GroupHeader(task_id=task_id, environment="env")
    payload = task_id.encode() * 9
    body = groups_pb2.Group(header=header, payload=payload).SerializeToString()
    checksum = group_checksum(header.SerializeToString(), payload_checksum(payload))
    return ops.NewGroup(run.group(task_id, body, **facts).facts, body, checksum)


async def push_both_ways(run: Run) -> None:
    await run.push(real(run, "relayed"), real(run, "other"), await written(run, "written"), await written(run, "again"))


async def written(run: Run, task_id: str, **facts: Any) -> ops.NewGroup:
    return await run.write(real(run, task_id, **facts))


async def push_what_ends_at_once(run: Run) -> None:
    """Refused for good, filtered, and not needed: deleted with the answer."""
    await run.push(
        await written(run, "newer", tail=7),
        await written(run, "equal", rewards=(1.0, 1.0)),
        real(run, "even", rewards=(1.0, 1.0)),
        await written(run, "queued"),
    )


async def meet_a_full_queue(run: Run) -> None:
    await run.push(*[await written(run, f"w{number}") for number in range(4)], *[real(run, f"r{n}") for n in range(4)])


async def free(run: Run) -> None:
    await run.push(real(run, "a"), await written(run, "b"))
    await run.batch(0)
    await run.publish(1, commit_through=0)
    await run.checkpoint(0)


async def hand_back(run: Run) -> None:
    await run.submit("task")
    await run.give_back(
        await run.one_lease(), partial_rollout=bytes(real(run, "task").body), head=ops.WeightVersion(1, 0)
    )


async def delete(run: Run) -> None:
    await run.push(real(run, "a"), await written(run, "b"))
    await run.store.delete_run(run.run_id)


ACTS: dict[str, tuple[Act, dict[str, Any]]] = {
    "push": (push_both_ways, {}),
    "ends at once": (push_what_ends_at_once, {"filter_equal_rewards": True}),
    "full": (meet_a_full_queue, {"max_queued_groups": 4, "overflow_action": OverflowAction.REJECT}),
    "free": (free, {}),
    "hand back": (hand_back, {}),
    "delete": (delete, {}),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_death_at_any_step_leaves_nothing_for_good(
    index: StoreServer, shards: StoreCluster, act: str, after: bool
) -> None:
    do, policy = ACTS[act]
    at = 0
    while True:
        at += 1
        store = await emptied(index, shards)
        run = Run(store)
        await run.create(batch_groups=2, **policy)
        death = Death(store, at, after=after)
        doing = asyncio.ensure_future(do(run))
        died = asyncio.ensure_future(death.came.wait())
        await asyncio.wait([doing, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if doing.done():
            await doing
            await store.close()
            break
        doing.cancel()
        await asyncio.wait([doing])
        await store.close()

        other = Run(await emptied(index, shards, keep=True))
        await other.store.sweep()
        if await other.store.list_runs():
            # As long after the crash as the sweep waits for whoever it could be.
            await other.at(run.now + STAGING_AGE_MS + 1)
            await other.store.sweep()
            assert await other.payload_keys() == await other.living_keys(), (at, await other.ledger())
            view = await other.view()
            amounts = {name: amount.groups for name, amount in view.groups.items()}
            assert amounts.pop("accepted") == sum(amounts.values())
        else:
            assert not await other.payload_keys(), at
        assert not await other.command("KEYS", index_key(run.run_id, "trash")), at
        await other.store.close()
    assert at > 3, "there are several steps"


async def test_the_audit_finds_what_nothing_names(store: RedisRunStore, shards: StoreCluster) -> None:
    """Payloads that a promoted replica brings back, and that an index forgets with its last writes."""
    run = Run(store)
    await run.create(batch_groups=4)
    await run.push(real(run, "a"), await written(run, "b"))
    unpushed = await written(run, "c")
    await run.submit("task")
    await run.give_back(
        await run.one_lease(), partial_rollout=bytes(real(run, "task").body), head=ops.WeightVersion(1, 0)
    )
    living = await run.payload_keys()
    assert len(living) == 3
    await store.sweep()
    orphans = set()
    for run_id in (run.run_id, "gone"):
        for number in range(20):
            group = real(run, "a" if number % 2 else f"unknown-{number}")
            key = payload_key(run_id, new_nonce(), group.checksum, len(group.body))
            await run.command("SET", key, group.body)
            orphans.add(key)
    cut = payload_key(run.run_id, new_nonce(), 0, 5 * PART_BYTES, 5)
    await run.command("SET", f"{cut}.2", b"a part without the first")
    orphans.add(cut)
    assert {shards.shard_of(key) for key in orphans} == {0, 1, 2}
    # No turn of any server has come again.
    assert await store.sweep() == 0
    for key in await store._connection.command("KEYS", audited_key("*", "*")):
        await store._connection.command("DEL", key)
    other = await beside(store)
    assert await other.sweep() == len(orphans)
    # It deletes what the audit has put on trash.
    await other.sweep()
    await other.close()
    assert await run.payload_keys() == living
    assert await run.unpushed_keys() == {run.key_of(unpushed)}
    assert await run.bodies(await run.batch(0, batch_groups=2)) == [real(run, "a").body, real(run, "b").body]


async def test_an_index_that_lost_its_last_writes_is_noticed_and_forgets_no_payload(shards: StoreCluster) -> None:
    with store_server() as index:
        run = Run(await emptied(index, shards))
        await run.create(batch_groups=2, max_queued_groups=8)
        await run.push(real(run, "kept"), real(run, "kept-too"))
        await run.store.sweep()
        index.save()
        await run.push(real(run, "forgotten"), await written(run, "forgotten-too"))
        assert len(await run.payload_keys()) == 4
        index.kill()
        index.start()
        with pytest.raises(StoreUnavailable):
            await run.view()
        with pytest.raises(StoreRolledBack):
            await run.push(real(run, "later"))
        await run.resume()
        await run.push(real(run, "later"))
        assert (await run.ledger()) == {"accepted": 3, "queued": 3}
        # The first sweep audits, the second deletes.
        await run.store.sweep()
        await run.check()
        assert len(await run.payload_keys()) == 3
        await run.store.close()


async def test_what_is_staged_no_more_is_refused(store: RedisRunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that was stopped for longer than the sweep waits: its payloads are deleted, so nothing indexes them."""
    run = Run(store)
    await run.create()
    assert store._shards is not None
    stored, groups = store._shards.run, (real(run, "a"), await written(run, "b"))

    async def stopped(*args: Any, **kwargs: Any) -> None:
        await stored(*args, **kwargs)
        monkeypatch.undo()
        await store._connection.command("DEL", index_key(run.run_id, "staging"))

    monkeypatch.setattr(store._shards, "run", stopped)
    kinds = await run.push_kinds(*groups)
    assert kinds == ["gone", "payload_missing"]
    assert await run.ledger() == {}
    await run.check()
