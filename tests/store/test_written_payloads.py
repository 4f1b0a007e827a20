"""Pushes of groups that their pushers have written to the store, whole and in parts: whose the payload is after each
outcome.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction
from buffer_wire.errors import StoreOutOfMemory, StoreRolledBack
from buffer_wire.payloads import keys
from tests.store.driver import Run, emptied
from tests.store.test_evaluations import lease, submit
from tests.support.small_parts import parts_of_bytes
from tests.support.store_cluster import StoreCluster
from tests.support.store_server import StoreServer

BLOCK, REJECT, DROP = OverflowAction.BLOCK, OverflowAction.REJECT, OverflowAction.DROP_OLDEST


@pytest.fixture(params=[keys.PART_BYTES, 3], ids=["whole", "in parts"])
async def run(request: pytest.FixtureRequest, server: StoreServer, cluster: StoreCluster | None) -> AsyncIterator[Run]:
    with parts_of_bytes(request.param):
        store = await emptied(server, cluster)
        yield Run(store)
        await store.close()


async def stays(run: Run, written: ops.NewGroup) -> bool | None:
    """True where the payload stays, False where it expires; None: it is not there."""
    (ttl,) = {min(0, await run.command("PTTL", key)) for key in run.part_keys_of(written)}
    return None if ttl == -2 else ttl == -1


async def counted(run: Run) -> list[int]:
    """Accepted groups that their pushers have written, and their bytes."""
    statistics = (await run.view()).statistics
    return [statistics["written_groups"], statistics["written_bytes"]]


async def test_an_accepted_payload_stays_and_is_the_groups(run: Run) -> None:
    await run.create()
    written = await run.write(run.group("a", b"written"))
    assert await stays(run, written) is False
    assert await run.push_kinds(written, run.group("b", b"relayed")) == ["queued", "queued"]
    assert await stays(run, written) is True
    batch = await run.batch(0)
    assert await run.bodies(batch) == [b"written", b"relayed"]
    assert batch.shard[0].payload_key == run.key_of(written)
    assert await counted(run) == [1, len(b"written")]
    await run.check()


async def test_a_repeated_push_is_answered_the_same_and_makes_no_second_group(run: Run) -> None:
    await run.create(batch_groups=1, filter_equal_rewards=True)
    queued = await run.write(run.group("a"))
    filtered = await run.write(run.group("b", rewards=(1.0, 1.0)))
    for _ in range(2):
        assert await run.push_kinds(queued, filtered) == ["queued", "filtered"]
    # Pulled, and even if the policy would not have it any more.
    await run.batch(0)
    await run.store.call(commands.update_policy(run.run_id, replace((await run.view()).policy, max_queued_tokens=5)))
    assert await run.push_kinds(queued, filtered) == ["queued", "filtered"]
    assert await stays(run, queued) is True
    assert await run.ledger() == {"accepted": 2, "delivered": 1, "filtered": 1}
    assert (await counted(run))[0] == 2
    await run.check()


async def test_what_is_not_there_is_missing_and_nothing_is_accepted(run: Run) -> None:
    await run.create(overflow_action=DROP)
    await run.fill("x", "y")
    written = await run.write(run.group("a"))
    await run.command("UNLINK", run.part_keys_of(written)[-1])
    before = await run.view()
    assert await run.push_kinds(written) == ["payload_missing"]
    # Nothing was dropped for it either.
    assert await run.view() == before
    await run.set_payload(written, b"body")
    assert await run.push_kinds(written) == ["queued"]
    await run.check()


@pytest.mark.parametrize("body", [b"bod", b"bodys"])
async def test_another_length_is_missing_and_expires(run: Run, body: bytes) -> None:
    await run.create()
    written = await run.write(run.group("a"), body)
    assert await run.push_kinds(written) == ["payload_missing"]
    assert await stays(run, written) is False
    await run.check()


async def test_a_late_repeat_of_the_write_takes_nothing_from_the_group(run: Run) -> None:
    await run.create()
    written = await run.write(run.group("a", b"first"))
    await run.push_kinds(written)
    await run.set_payload(written, b"other")
    assert await stays(run, written) is True
    await run.fill("b")
    assert await run.bodies(await run.batch(0)) == [b"first", b"body-b"]


async def test_a_payload_is_never_that_of_two_groups(run: Run) -> None:
    await run.create(batch_groups=1)
    written = await run.write(run.group("a"))
    assert await run.push_kinds(written) == ["queued"]
    # Another header has another checksum; were it the same all the same, the payload has its group.
    stranger = replace(written, facts=replace(written.facts, task_id="b"))
    assert await run.push_kinds(stranger) == ["payload_missing"]
    assert await stays(run, written) is True
    await run.check()


async def test_what_is_not_needed_is_deleted_with_the_answer(run: Run) -> None:
    await run.create(filter_equal_rewards=True, max_queued_tokens=1_000)
    await run.submit("t")
    grant = await run.one_lease()
    await run.push(run.group(grant), run.group("a"))
    groups = {
        "duplicate": run.group("a"),
        "closed": run.group(grant, lease_id="", incarnation=grant.incarnation),
        "unknown_lease": run.group("z", lease_id="z/0/1"),
        "filtered": run.group("f", rewards=(1.0, 1.0)),
        "invalid": run.group("v", tokens=2_000),
    }
    for outcome, group in groups.items():
        written = await run.write(group, bytes(group.facts.size_bytes))
        assert await run.push_kinds(written) == [outcome]
        assert await stays(run, written) is None
    await run.check()


async def test_a_deletion_takes_nothing_from_what_is_written_and_accepted_later(run: Run) -> None:
    await run.create()
    early = await run.write(run.group("a", tail=3))
    view = await run.view()
    pushed = await run.store.push(run.run_id, [early])
    assert [outcome.kind.value for outcome in pushed.outcomes] == ["invalid"]
    assert (await run.view()).revision == view.revision
    await run.set_payload(early, b"body")
    await run.publish(3)
    # The same push, whose answer got lost.
    assert await run.push_kinds(early) == ["queued"]
    await run.check()
    assert await stays(run, early) is True


async def test_who_meets_a_full_queue_keeps_the_payload_for_the_next_try(run: Run) -> None:
    await run.create(overflow_action=REJECT)
    await run.fill("x", "y")
    written = await run.write(run.group("z", b"kept"))
    for key in run.part_keys_of(written):
        await run.command("PEXPIRE", key, 5_000)
    assert await run.push_kinds(written) == ["rejected_full"]
    # As long again as if it were new.
    assert all([await run.command("PTTL", key) > 5_000 for key in run.part_keys_of(written)])
    await run.batch(0)
    assert await run.push_kinds(written) == ["queued"]
    await run.fill("w")
    assert await run.bodies(await run.batch(1)) == [b"kept", b"body-w"]
    await run.check()


async def test_a_blocked_payload_stays_and_a_repeated_push_goes_on_waiting(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    first, second = await run.write(run.group("z", b"first")), await run.write(run.group("w", b"second"))
    assert await run.push_kinds(first, second) == ["blocked", "blocked"]
    line = await run.members("waiting")
    assert line == [run.key_of(first), run.key_of(second)]
    # Another replica, to which the client came after its own had died.
    assert await run.push_kinds(second, first) == ["blocked", "blocked"]
    assert await run.members("waiting") == line
    assert await stays(run, first) is True
    await run.check()
    await run.batch(0)
    assert await run.push_kinds(first, second) == ["queued", "queued"]
    assert await run.bodies(await run.batch(1)) == [b"first", b"second"]
    await run.check()


async def retry(run: Run, *groups: ops.NewGroup) -> list[str]:
    tried = await run.store.retry_push(run.run_id, [(group.facts, run.key_of(group)) for group in groups])
    return [outcome.kind.value for outcome in tried.outcomes]


async def test_a_retry_takes_a_blocked_payload(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    written = await run.write(run.group("z", b"blocked"))
    assert await run.push_kinds(written) == ["blocked"]
    assert await retry(run, written) == ["blocked"]
    await run.batch(0)
    assert await retry(run, written) == ["queued"]
    assert await retry(run, written) == ["queued"]
    await run.check()


async def test_what_waited_and_was_given_up_is_missing(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    written = await run.write(run.group("z"))
    await run.push(written)
    await run.store.call(commands.abandon_push(run.run_id, [run.key_of(written)]))
    assert await stays(run, written) is None
    assert await retry(run, written) == ["payload_missing"]
    # The same key again: no deletion of before comes late.
    await run.set_payload(written, b"body")
    assert await run.push_kinds(written) == ["blocked"]
    await run.store.sweep()
    assert await stays(run, written) is True
    await run.check()


async def test_a_blocked_payload_that_is_rejected_after_all_expires(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    written = await run.write(run.group("z"))
    await run.push(written)
    policy = (await run.view()).policy
    await run.store.call(commands.update_policy(run.run_id, replace(policy, overflow_action=REJECT)))
    assert await retry(run, written) == ["rejected_full"]
    assert await stays(run, written) is False
    await run.check()


async def test_room_that_takes_several_calls_leaves_the_payloads_to_their_groups(run: Run) -> None:
    await run.create(batch_groups=1, overflow_action=DROP, max_queued_groups=400, max_queued_tokens=4_000)
    await run.fill(*(f"x{i}" for i in range(400)))
    written = await run.write(run.group("large", b"large", tokens=4_000))
    lost = await run.write(run.group("lost"))
    await run.command("UNLINK", *run.part_keys_of(lost))
    small = run.group("relayed", b"relayed", tokens=0)
    assert await run.push_kinds(written, small, lost) == ["queued", "queued", "payload_missing"]
    assert await run.queue() == ["large/0", "relayed/0"]
    await run.check()
    assert await run.bodies(await run.batch(0)) == [b"large"]


async def test_a_run_that_was_rolled_back_leaves_the_payload_for_a_repeat(run: Run) -> None:
    await run.create()
    written = await run.write(run.group("a"))
    with pytest.raises(StoreRolledBack):
        await run.push(written, seen=1_000)
    assert await stays(run, written) is False
    await run.resume(0)
    assert await run.push_kinds(written) == ["queued"]
    await run.check()


@pytest.mark.parametrize("queued", [("x",), ("x", "y")], ids=["with room", "without"])
async def test_a_store_without_memory_refuses_the_push_and_leaves_the_payload(
    run: Run, queued: tuple[str, ...]
) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill(*queued)
    written = await run.write(run.group("a"))
    before = await run.view()
    await run.command("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreOutOfMemory):
            await run.push(written)
    finally:
        await run.command("CONFIG", "SET", "maxmemory", 0)
    assert await run.view() == before
    assert await stays(run, written) is False
    await run.pull(0)
    assert await run.push_kinds(written) == ["queued"]
    await run.check()


async def test_the_result_of_an_evaluation_stays(run: Run) -> None:
    await run.create()
    await submit(run, count=2)
    kept, lost = [await run.write(run.group(grant, samples=1)) for grant in await lease(run)]
    await run.command("UNLINK", *run.part_keys_of(lost))
    for _ in range(2):
        assert await run.push_kinds(kept, lost) == ["recorded", "payload_missing"]
    assert await stays(run, kept) is True
    late = await run.write(replace(kept, body=b"body"))
    assert await run.push_kinds(late) == ["duplicate"]
    assert await stays(run, late) is None
    await run.store.call(commands.delete_evaluation(run.run_id, "e"))
    assert await run.push_kinds(kept) == ["closed"]
    await run.store.sweep()
    assert await stays(run, kept) is None
