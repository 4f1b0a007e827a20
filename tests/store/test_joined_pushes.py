"""Pushes to a run at the same time: they share calls of the script, and each is answered as if it were alone."""

import asyncio
import random
from collections import Counter

import pytest

from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction
from buffer_service.domain.ports import Topic
from buffer_service.store.transport.meter import NoMeter
from buffer_wire.errors import StoreRolledBack, UnprovenRevision
from buffer_wire.revision import Revision
from tests.store.driver import RUN, Run, claim
from tests.support.store_cluster import StoreCluster


class Counted(NoMeter):
    """Calls by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def took(self, operation: str, seconds: float) -> None:
        del seconds
        self.calls[operation] += 1


async def test_pushes_at_the_same_time_share_calls(
    run: Run, cluster: StoreCluster | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.create(max_queued_groups=200)
    counted = Counted()
    monkeypatch.setattr(run.store._connection, "_meter", counted)
    names = [f"t{i}" for i in range(64)]
    results = await asyncio.gather(*(run.store.push(RUN, [run.group(name, name.encode())]) for name in names))
    # The first leaves alone, since nothing is under way. Those on a cluster come when their payloads are stored.
    assert counted.calls["push"] <= (3 if cluster is None else 32)
    assert [[one.group_id for one in result.outcomes] for result in results] == [[f"{name}/0"] for name in names]
    assert {one.kind for result in results for one in result.outcomes} == {ops.PushKind.QUEUED}
    assert await run.ledger() == {"accepted": 64, "queued": 64}
    await run.check()


async def test_each_push_keeps_the_order_of_its_groups_and_all_are_accepted_once(run: Run) -> None:
    """Streams of bundles of any size, some repeated on another stream at the same time."""
    await run.create(max_queued_groups=1_000, batch_groups=1)
    rng = random.Random(5)
    accepted: Counter[str] = Counter()
    places: dict[str, int] = {}

    async def stream(name: str) -> None:
        first = 0
        while first < 60:
            bundle = [run.group(f"{name}.{i}") for i in range(first, first + rng.choice((1, 1, 1, 2, 7, 40)))]
            first += len(bundle)
            tries = [run.store.push(RUN, bundle) for _ in range(rng.choice((1, 2)))]
            for result in await asyncio.gather(*tries):
                assert len(result.outcomes) == len(bundle)
                assert {one.kind for one in result.outcomes} <= {ops.PushKind.QUEUED, ops.PushKind.DUPLICATE}
                accepted.update(one.group_id for one in result.outcomes if one.kind is ops.PushKind.QUEUED)

    await asyncio.gather(*(stream(f"s{i}") for i in range(12)))
    assert set(accepted.values()) == {1}
    for place in range(len(accepted)):
        (group,) = (await run.batch(place)).shard
        stream_name, number = group.group_id.removesuffix("/0").split(".")
        assert int(number) == places.get(stream_name, 0)
        places[stream_name] = int(number) + 1
    assert await run.ledger() == {"accepted": len(accepted), "delivered": len(accepted)}
    await run.check()


async def test_blocked_groups_wait_in_the_order_of_their_pushes(run: Run, cluster: StoreCluster | None) -> None:
    await run.create(max_queued_groups=2, overflow_action=OverflowAction.BLOCK)
    names = [f"t{i}" for i in range(6)]
    results = await asyncio.gather(*(run.store.push(RUN, [run.group(name)]) for name in names))
    outcomes = [result.outcomes[0] for result in results]
    waiting = [each.decode() for each in await run.command("ZRANGE", f"rb:{{{RUN}}}:waiting", 0, -1)]
    if cluster is not None:
        # Who has stored a payload first comes first.
        outcomes.sort(key=lambda one: waiting.index(one.payload_key) if one.payload_key else -1)
    assert [one.kind.value for one in outcomes] == ["queued"] * 2 + ["blocked"] * 4
    assert waiting == [one.payload_key for one in outcomes if one.payload_key]


async def test_a_revision_that_nobody_gave_out_is_refused_alone(run: Run) -> None:
    await run.create(max_queued_groups=100)
    seen = [Revision(10**9, "made up") if i in {3, 7} else claim(0) for i in range(10)]
    pushes = [run.store.push(RUN, [run.group(f"t{i}")], seen_revision=each) for i, each in enumerate(seen)]
    results = await asyncio.gather(*pushes, return_exceptions=True)
    refused = [i for i, result in enumerate(results) if isinstance(result, UnprovenRevision)]
    assert refused == [3, 7]
    assert await run.ledger() == {"accepted": 8, "queued": 8}
    await run.check()


async def test_a_store_that_was_rolled_back_is_found_out_by_any_of_them(run: Run, cluster: StoreCluster | None) -> None:
    await run.create(max_queued_groups=100)
    ahead = (await run.view()).revision + 5
    seen = [claim(ahead if i == 4 else 0) for i in range(8)]
    pushes = [run.store.push(RUN, [run.group(f"t{i}")], seen_revision=each) for i, each in enumerate(seen)]
    results = await asyncio.gather(*pushes, return_exceptions=True)
    assert isinstance(results[4], StoreRolledBack)
    assert (await run.view()).paused == "store_rolled_back"
    # Whoever was accepted had left before; beside the index that is the first one.
    accepted = sum(isinstance(result, ops.PushResult) for result in results)
    assert accepted == 1 or (cluster is not None and accepted < 8)
    assert (await run.view()).groups["accepted"].groups == accepted
    await run.check()


async def test_who_gives_up_takes_nobody_along(run: Run) -> None:
    await run.create(max_queued_groups=100)
    pushes = [asyncio.create_task(run.store.push(RUN, [run.group(f"t{i}")])) for i in range(8)]
    await asyncio.sleep(0)
    for given_up in (0, 3):
        pushes[given_up].cancel()
    results = await asyncio.gather(*pushes, return_exceptions=True)
    kinds = [result.outcomes[0].kind.value if isinstance(result, ops.PushResult) else "" for result in results]
    assert kinds == ["", "queued", "queued", "", "queued", "queued", "queued", "queued"]


@pytest.mark.parametrize("action", [OverflowAction.DROP_OLDEST, OverflowAction.REJECT])
async def test_room_is_made_for_one_after_the_other(run: Run, action: OverflowAction) -> None:
    await run.create(max_queued_groups=4, overflow_action=action)
    results = await asyncio.gather(*(run.store.push(RUN, [run.group(f"t{i}")]) for i in range(40)))
    kinds = Counter(result.outcomes[0].kind.value for result in results)
    assert kinds == ({"queued": 40} if action is OverflowAction.DROP_OLDEST else {"queued": 4, "rejected_full": 36})
    assert (await run.ledger())["queued"] == 4
    await run.check()


async def test_a_pull_is_told_when_what_it_lacks_leaves_for_the_store(run: Run) -> None:
    await run.create(batch_groups=100, max_queued_groups=1_000)
    notifications = run.store.notifications
    before = notifications.ticket(RUN, Topic.GROUPS)
    notifications.lacks(RUN, 3)
    for name, told in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        await run.push(run.group(name))
        assert notifications.ticket(RUN, Topic.GROUPS) == before + told
