"""Groups that several steps train on: drawn from what was committed, beside each step's own groups."""

from dataclasses import replace
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import UNSET
from buffer_wire.errors import InvalidPolicy
from tests.store.driver import Run, claim

TWICE: dict[str, Any] = {"max_uses": 2, "reuse_share_milli": 500, "reuse_max_staleness": 2}


def names(batch: ops.Batch) -> list[tuple[str, int]]:
    """Each group of a shard with how often it was used before."""
    return [(group.group_id.removesuffix("/0"), group.prior_uses) for group in batch.shard]


async def uses(run: Run) -> dict[str, int]:
    reuse = (await run.view()).reuse
    assert reuse.balanced
    states = {
        state: getattr(reuse, state) for state in ("reusable_groups", "delivered", "trained", "given_back", "lost")
    }
    return {state: count for state, count in states.items() if count}


async def step(run: Run, number: int, *groups: str, publish: bool = True, **kwargs: Any) -> list[tuple[str, int]]:
    """Fill, pull and commit a step, and publish the next version where one is to be."""
    await run.fill(*groups)
    batch = await run.batch(number, **kwargs)
    if publish:
        await run.publish(number + 1, number)
    else:
        await run.commit(number)
    return names(batch)


async def test_a_step_uses_groups_of_earlier_ones_beside_its_own(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=8, **TWICE)
    assert await step(run, 0, "a", "b", "c", "d") == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    assert await uses(run) == {"reusable_groups": 4}
    await run.fill("e", "f", "g", "h")
    batch = await run.batch(1)
    assert names(batch) == [("e", 0), ("f", 0), ("g", 0), ("h", 0), ("c", 1), ("d", 1)]
    assert (batch.total_groups, batch.total_tokens, batch.reused_groups, batch.final) == (6, 60, 2, True)
    assert await uses(run) == {"reusable_groups": 2, "delivered": 2}
    assert (await run.bodies(batch))[-2:] == [b"body-c", b"body-d"]
    await run.commit(1)
    # The ledger of groups counts each of them once.
    view = await run.view()
    assert {name: amount.groups for name, amount in view.groups.items() if amount.groups} == {
        "accepted": 8,
        "trained": 8,
    }
    assert await uses(run) == {"reusable_groups": 6, "trained": 2}
    await run.check()


async def test_a_group_has_no_more_uses_than_it_may(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=4, max_uses=3, reuse_share_milli=1_000, reuse_max_staleness=9)
    seen = [await step(run, number, name, publish=False) for number, name in enumerate("abcdef")]
    assert seen[0] == [("a", 0)]
    again = [use for batch in seen[1:] for use in batch[1:]]
    assert len(again) == 5
    # The least used of the freshest, so that each has its second use before any has its third.
    assert again == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]


async def test_what_is_too_old_is_used_no_more(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=4, max_uses=8, reuse_share_milli=1_000, reuse_max_staleness=2)
    await step(run, 0, "a")
    assert await step(run, 1, "b") == [("b", 0), ("a", 1)]
    # Both have head version 0: of train_version 2 they are two versions old, of 3 too old.
    assert await step(run, 2, "c") == [("c", 0), ("b", 1)]
    assert await step(run, 3, "d") == [("d", 0)]
    assert await uses(run) == {"reusable_groups": 1, "trained": 2}
    await run.check()


async def test_payload_and_task_outlive_the_checkpoint_of_their_own_step(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=4, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    await run.checkpoint(0)
    await run.check()
    assert set(await run.hash("tasks")) == {"a", "b"}
    assert await step(run, 1, "c", "d", publish=False) == [("c", 0), ("d", 0), ("b", 1)]
    await run.checkpoint(1)
    # b has had its uses, and no step has it.
    assert set(await run.hash("tasks")) == {"a", "c", "d"}
    await run.check()


async def test_a_replay_is_the_same_for_any_world_size(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=8, equal_shards=True, **TWICE)
    await run.fill("a", "b", "c", "d", "e", "f", "g", "h")
    await run.batch(0, world_size=2)
    await run.commit(0)
    first = await run.shards(1, world_size=2)
    assert [len(shard) for shard in first] == [3, 3]
    assert await run.shards(1, world_size=2) == first
    await run.resume(1)
    alone = [group.group_id for group in (await run.batch(1)).shard]
    assert sorted(alone) == sorted(name for shard in first for name in shard)


async def test_a_rejected_use_leaves_its_step_and_nothing_comes_for_it(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=4, max_uses=4, reuse_share_milli=1_000, reuse_max_staleness=9)
    await step(run, 0, "a", "b", publish=False)
    await run.fill("c", "d")
    await run.batch(1)
    request = ops.Reject(run.term, 1, ["a/0"], "no use")
    rejected = await run.store.call(commands.reject(run.run_id, request, seen_revision=claim(0)))
    assert (rejected.rejected_groups, rejected.missing_groups, rejected.final) == (1, 0, True)
    assert (rejected.total_groups, rejected.reused_groups) == (3, 1)
    assert names(await run.batch(1)) == [("c", 0), ("d", 0), ("b", 1)]
    await run.commit(1)
    assert await uses(run) == {"reusable_groups": 3, "trained": 1, "given_back": 1}
    await run.check()


async def test_a_lost_use_starts_no_task_anew(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=4, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    await run.fill("c", "d")
    await run.batch(1)
    await run.lose(1, "b/0")
    assert names(await run.batch(1)) == [("c", 0), ("d", 0)]
    view = await run.view()
    assert (view.groups["lost"].groups, view.groups["trained"].groups, view.tasks["pending"]) == (0, 2, 0)
    assert await uses(run) == {"reusable_groups": 1, "lost": 1}


@pytest.mark.parametrize("mode", [ops.ResumeMode.REQUEUE, ops.ResumeMode.DISCARD])
async def test_a_resume_that_takes_a_step_back_gives_uses_back(run: Run, mode: ops.ResumeMode) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    await step(run, 1, "c", "d", publish=False)
    await run.resume(1, mode)
    assert await uses(run) == {"reusable_groups": 2, "given_back": 1}
    await run.fill("e", "f")
    assert names(await run.batch(1))[2:] == [("b", 1)]
    await run.check()


async def test_steps_that_are_replayed_keep_their_uses(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    await step(run, 1, "c", "d", publish=False)
    await run.resume(0)
    # Nothing is trained yet, and so nothing may be used again.
    assert await uses(run) == {"delivered": 1}
    assert names(await run.batch(1)) == [("c", 0), ("d", 0), ("b", 1)]
    await run.commit(1)
    assert await uses(run) == {"reusable_groups": 3, "trained": 1}
    await run.check()


async def test_a_resume_before_the_checkpoint_forgets_what_could_be_used_again(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    await run.checkpoint(0)
    await run.resume(0, allow_regenerate=True)
    assert await uses(run) == {}
    await run.check()
    assert await run.payload_keys() == set()
    # The same tasks are generated again.
    await run.fill("a", "b")
    assert names(await run.batch(0)) == [("a", 0), ("b", 0)]
    await run.check()


async def test_the_policy_can_end_reuse_at_any_time(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    policy = (await run.view()).policy
    ended = replace(policy, max_uses=1, reuse_share_milli=0, reuse_max_staleness=UNSET)
    await run.store.call(commands.update_policy(run.run_id, ended))
    assert await step(run, 1, "c", "d", publish=False) == [("c", 0), ("d", 0)]
    assert await uses(run) == {}
    await run.check()


async def test_a_deleted_run_leaves_nothing_of_what_could_be_used_again(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, **TWICE)
    await step(run, 0, "a", "b", publish=False)
    await run.checkpoint(0)
    await run.store.delete_run(run.run_id)
    assert await run.command("KEYS", f"rb:{{{run.run_id}}}:*") == []
    await run.store.sweep()
    assert await run.command("KEYS", "rb:p:*") == []


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"max_uses": 2}, "max_uses"),
        ({"reuse_share_milli": 500}, "reuse_share_milli"),
        ({"reuse_max_staleness": 1}, "reuse_max_staleness"),
        ({**TWICE, "reuse_share_milli": 0}, "reuse_share_milli"),
        ({**TWICE, "reuse_share_milli": 1_001}, "reuse_share_milli"),
        ({**TWICE, "batch_groups": 1}, "reuse_share_milli"),
        ({**TWICE, "batch_tokens": 100}, "max_uses"),
        ({**TWICE, "batch_groups": 4_096}, "max_uses"),
    ],
)
async def test_fields_that_contradict_each_other_are_refused_by_name(
    run: Run, policy: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        await run.create(**policy)
    assert refused.value.attributes["field"] == field
