"""A store that is behind what it has acknowledged."""

from collections.abc import Awaitable, Callable

import pytest

from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_wire.errors import RunPaused, StoreRolledBack
from tests.store.driver import Run


async def test_a_caller_who_has_seen_more_pauses_the_run(run: Run) -> None:
    await run.create()
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    revision = (await run.view()).revision
    with pytest.raises(StoreRolledBack) as behind:
        await run.push(run.group(a), seen=revision + 5)
    assert behind.value.attributes == {
        "run_id": run.run_id,
        "seen_revision": str(revision + 5),
        "revision": str(revision),
    }
    view = await run.view()
    assert (view.paused, view.revision) == ("store_rolled_back", revision)
    await run.check()
    assert await run.payload_keys() == set()
    # Leases go on and may come back; nothing new is accepted.
    assert (await run.store.extend(run.run_id, "w", "i", [a.lease_id])).states == [ops.LeaseState.LIVE]
    assert await run.give_back(b) == ["pending"]
    assert (await run.lease()).wait is ops.LeaseWait.PAUSED


Operation = Callable[[Run], Awaitable[object]]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda run: run.submit("x"), id="submit"),
        pytest.param(lambda run: run.push(run.group("x")), id="push"),
        pytest.param(lambda run: run.pull(1), id="pull"),
        pytest.param(lambda run: run.commit(0), id="commit"),
        pytest.param(lambda run: run.publish(1), id="publish"),
        pytest.param(lambda run: run.checkpoint(0), id="checkpoint"),
    ],
)
async def test_nothing_is_decided_until_a_resume(run: Run, operation: Operation) -> None:
    await run.create()
    await run.fill("a", "b")
    await run.batch(0)
    with pytest.raises(StoreRolledBack):
        await run.lease(seen=1000)
    with pytest.raises(RunPaused) as paused:
        await operation(run)
    assert paused.value.reason == "run_paused"
    assert (await run.batch(0)).replayed
    resumed = await run.resume()
    assert resumed.revision == 1001
    assert (await run.view()).paused == ""
    await run.commit(0, seen=1001)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda run: run.submit("x", seen=99), id="submit"),
        pytest.param(lambda run: run.lease(seen=99), id="lease"),
        pytest.param(lambda run: run.store.extend(run.run_id, "w", "i", [], seen_revision=99), id="extend"),
        pytest.param(lambda run: run.store.give_back(run.run_id, "w", "i", [], seen_revision=99), id="give_back"),
        pytest.param(lambda run: run.push(run.group("x"), seen=99), id="push"),
        pytest.param(lambda run: run.pull(0, seen=99), id="pull"),
        pytest.param(lambda run: run.commit(0, seen=99), id="commit"),
        pytest.param(lambda run: run.publish(1, seen=99), id="publish"),
        pytest.param(lambda run: run.checkpoint(0, seen=99), id="checkpoint"),
        pytest.param(
            lambda run: run.store.update_policy(run.run_id, RunPolicy(), seen_revision=99), id="update_policy"
        ),
    ],
)
async def test_every_operation_notices(run: Run, operation: Operation) -> None:
    await run.create()
    with pytest.raises(StoreRolledBack):
        await operation(run)
    assert (await run.view()).paused == "store_rolled_back"


async def test_a_refused_retry_gives_up_what_was_blocked_but_not_what_was_queued(run: Run) -> None:
    await run.create(overflow_action=OverflowAction.BLOCK, max_queued_groups=3)
    await run.fill("x", "y")
    kept, waiting = run.group("kept"), run.group("waiting")
    (first,) = await run.push(kept)
    (blocked,) = await run.push(waiting)
    keys = {await _key(run, "kept/0"): kept, blocked.payload_key: waiting}
    assert first.kind is ops.PushKind.QUEUED
    with pytest.raises(StoreRolledBack):
        await run.store.retry_push(run.run_id, [(g.facts, key) for key, g in keys.items()], seen_revision=99)
    await run.check()
    assert len(await run.payload_keys()) == 3


async def _key(run: Run, group_id: str) -> str:
    key: bytes = (await run.record("groups", group_id))[3]
    return key.decode()
