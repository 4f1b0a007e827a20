"""Pushes without leases that come again after the checkpoint of their step, and much later."""

from collections.abc import Iterator
from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import groups
from buffer_service.domain.policy import RunPolicy
from buffer_service.store import scripts
from tests.store.driver import Run

KEPT = 4


@pytest.fixture
def few_are_remembered(run: Run) -> Iterator[None]:
    """So few that a test gets beyond them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(groups, "REMEMBERED_TASKS", KEPT)
        scripts.expanded.cache_clear()
        scripts._load_scripts.cache_clear()
        connection: Any = run.store._connection
        connection._scripts = scripts.load_scripts()
        yield
    scripts.expanded.cache_clear()
    scripts._load_scripts.cache_clear()


async def trained(run: Run, step: int, *names: str) -> None:
    """A step of these groups, up to its checkpoint."""
    known = (await run.view()).revision
    assert await run.push_kinds(*(run.group(name, first_revision=known) for name in names)) == ["queued"] * len(names)
    await run.batch(step, batch_groups=len(names))
    await run.commit(step)
    await run.checkpoint(step)
    assert await run.payload_keys() == set()


async def test_a_repeat_after_the_checkpoint_is_closed(run: Run) -> None:
    await run.create()
    known = (await run.view()).revision
    await trained(run, 0, "a", "b")
    # With and without a word on when it was first tried.
    for first in (known, 0):
        assert await run.push_kinds(run.group("a", first_revision=first)) == ["closed"]
    assert (await run.view()).statistics["pushes_closed"] == 2
    assert await run.ledger() == {"accepted": 2, "trained": 2}
    await run.check()


async def test_what_ended_outside_of_steps_is_closed_too(run: Run) -> None:
    await run.create(max_staleness=0)
    known = (await run.view()).revision
    await run.fill("stale")
    await run.publish(1)
    await run.short(0)
    await trained_at(run, 1)
    assert await run.push_kinds(run.group("stale", first_revision=known)) == ["closed"]


async def trained_at(run: Run, version: int) -> None:
    await run.fill("x", "y", head=version)
    await run.batch(0)
    await run.commit(0)
    await run.checkpoint(0)


@pytest.mark.usefixtures("few_are_remembered")
async def test_a_repeat_that_may_be_forgotten_is_refused_by_name(run: Run) -> None:
    await run.create()
    known = (await run.view()).revision
    await trained(run, 0, "a", "b")
    between = (await run.view()).revision
    await trained(run, 1, "c", "d")
    assert await run.push_kinds(run.group("a", first_revision=known)) == ["closed"]
    await trained(run, 2, "e")
    assert len(await run.members("remembered")) == KEPT
    (refused,) = await run.push(run.group("a", first_revision=known))
    assert (refused.kind, refused.field, refused.value) == (ops.PushKind.FORGOTTEN, "first_revision", str(known))
    assert refused.limit.startswith(f"at least {between}: ")
    # What was first tried after all that is forgotten is no repeat of it, whatever its name.
    assert await run.push_kinds(run.group("new", first_revision=between)) == ["queued"]
    assert await run.push_kinds(run.group("d", first_revision=known)) == ["closed"]
    await run.check()


async def test_tasks_of_a_run_that_leases_all_its_work_take_no_memory(run: Run) -> None:
    await run.create()
    await run.submit("a", "b")
    assert await run.push_kinds(*(run.group(lease) for lease in (await run.lease(2)).grants)) == ["queued"] * 2
    await run.batch(0)
    await run.commit(0)
    await run.checkpoint(0)
    assert await run.members("remembered") == []


async def test_what_is_regenerated_may_be_pushed_again_but_not_by_a_repeat(run: Run) -> None:
    await run.create()
    known = (await run.view()).revision
    await trained(run, 0, "a", "b")
    await run.resume(0, allow_regenerate=True)
    assert await run.push_kinds(run.group("a", first_revision=known)) == ["forgotten"]
    present = (await run.view()).revision
    assert await run.push_kinds(run.group("a", first_revision=present)) == ["queued"]
    await run.check()


async def test_a_repeat_from_a_deleted_run_is_none_of_the_next_one_of_its_name(run: Run) -> None:
    await run.create()
    known = (await run.view()).revision
    await run.fill("a")
    await run.store.delete_run(run.run_id)
    # As the service does: it begins above whatever the former run has got to.
    await run.store.create_run(run.run_id, RunPolicy(batch_groups=2), revision=1_000)
    assert await run.push_kinds(run.group("a", first_revision=known)) == ["forgotten"]
    assert await run.push_kinds(run.group("a", first_revision=1_000)) == ["queued"]
