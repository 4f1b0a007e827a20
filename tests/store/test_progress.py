"""Commit, publish, checkpoint, retention, resume."""

from dataclasses import replace

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.store.keys import index_key
from buffer_wire.errors import NotCommitted, ReplayGap, StaleTerm, StepAhead, VersionConflict
from tests.store.driver import Run, weights

REPLAY, REQUEUE, DISCARD = ops.ResumeMode.REPLAY, ops.ResumeMode.REQUEUE, ops.ResumeMode.DISCARD


async def steps(run: Run, count: int, first: int = 0) -> list[ops.Batch]:
    """Assemble steps of two groups each: s0a, s0b, s1a, ..."""
    batches = []
    for step in range(first, first + count):
        await run.fill(f"s{step}a", f"s{step}b")
        batches.append(await run.batch(step))
    return batches


async def test_commit_settles_delivered_groups_once(run: Run) -> None:
    await run.create()
    await steps(run, 3)
    revision, committed = await run.commit(1)
    assert committed == 2
    assert await run.ledger() == {"accepted": 6, "trained": 4, "delivered": 2}
    assert await run.commit(1) == (revision, 2)
    assert await run.commit(0) == (revision, 2)
    with pytest.raises(StepAhead):
        await run.commit(3)


async def test_publish_commits_in_the_same_decision(run: Run) -> None:
    await run.create()
    await steps(run, 2)
    published = await run.publish(1, commit_through=1)
    assert (published.published, published.committed_steps) == (weights(1), 2)
    view = await run.store.call(commands.weights(run.run_id))
    assert (view.published, view.manifest, view.paused) == (weights(1), b"manifest-1", False)


async def test_a_repeated_publish_only_commits(run: Run) -> None:
    await run.create()
    await steps(run, 1)
    first = await run.publish(1)
    assert (await run.publish(1)).revision == first.revision
    again = await run.publish(1, commit_through=0)
    assert (again.revision, again.committed_steps) == (first.revision + 1, 1)


async def test_publish_refuses_what_is_not_newer(run: Run) -> None:
    await run.create()
    await run.publish(3)
    for version, manifest in [(3, b"another"), (2, b"manifest-2"), (0, b"")]:
        with pytest.raises(VersionConflict):
            await run.publish(version, manifest=manifest)
    with pytest.raises(StepAhead):
        await run.publish(4, commit_through=0)
    assert (await run.view()).published == weights(3)
    run.term = 7
    with pytest.raises(StaleTerm):
        await run.publish(4)


async def test_the_next_train_version_counts_publishes_still_to_come(run: Run) -> None:
    await run.create(max_staleness=1, batches_per_publish=2, max_queued_groups=9)
    await run.submit("a")
    await steps(run, 4)
    assert (await run.lease(loaded=weights(0))).required_version == 1
    await run.publish(1, commit_through=1)
    assert (await run.lease(loaded=weights(0))).required_version == 1
    await run.publish(2, commit_through=3)
    assert (await run.lease(loaded=weights(0))).required_version == 1
    assert len((await run.lease(loaded=weights(1))).grants) == 1


async def test_a_checkpoint_frees_payloads_records_and_tombstones(run: Run) -> None:
    await run.create(max_attempts=1)
    await run.submit("failing")
    await run.give_back(await run.one_lease(), kind=ops.ReturnKind.FAILED)
    await steps(run, 2)
    await run.fill("x", "y", "z")  # z drops x
    with pytest.raises(NotCommitted):
        await run.checkpoint(0)
    await run.commit(0)
    revision, freed = await run.checkpoint(0)
    assert freed == 1
    assert await run.checkpoint(0) == (revision, 1)
    await run.check()
    assert len(await run.payload_keys()) == 4
    tasks = await run.command("HKEYS", index_key(run.run_id, "tasks"))
    assert sorted(tasks) == [b"s1a", b"s1b", b"y", b"z"]
    assert await run.ledger() == {"accepted": 7, "queued": 2, "delivered": 2, "trained": 2, "dropped_overflow": 1}
    assert await run.push_kinds(run.group("s1a"), run.group("y")) == ["duplicate", "duplicate"]


async def test_checkpointing_everything_leaves_only_the_run(run: Run) -> None:
    await run.create()
    await steps(run, 3)
    await run.publish(1, commit_through=2)
    await run.checkpoint(2)
    await run.store.sweep()
    left = {key.decode() for key in await run.command("KEYS", "*")}
    names = ["run", "test_now", "manifests", "commits", "environments", "env_ledger", "response_lengths", "snapshots"]
    # Names alone of what was pushed without leases.
    names.append("remembered")
    assert left == {*run.names, *(index_key(run.run_id, name) for name in names)}


async def test_without_checkpoints_retention_frees_old_steps(run: Run) -> None:
    await run.create(retained_steps=2)
    await steps(run, 5)
    await run.publish(1, commit_through=3)
    assert (await run.view()).checkpointed_steps == 2
    with pytest.raises(ReplayGap):
        await run.pull(1)
    assert (await run.batch(2)).replayed
    await run.check()
    assert len(await run.payload_keys()) == 6


async def test_thousands_of_groups_are_freed_by_one_checkpoint(run: Run) -> None:
    await run.create(batch_groups=900)
    for step in range(3):
        for part in range(3):
            await run.push(*(run.group(f"t{step}-{part}-{i}") for i in range(300)))
        await run.batch(step)
    await run.commit(2)
    await run.checkpoint(2)
    assert await run.command("HLEN", index_key(run.run_id, "tasks")) == 0
    assert await run.command("SCARD", index_key(run.run_id, "trash")) == 0
    assert await run.payload_keys() == await run.living_keys()
    await run.check()
    assert await run.payload_keys() == set()


async def test_the_sweep_goes_on_with_what_a_crashed_checkpoint_left(run: Run) -> None:
    await run.create(batch_groups=700)
    for step in range(2):
        await run.push(*(run.group(f"t{step}-{i}") for i in range(700)))
        await run.batch(step)
    await run.commit(1)
    # The replica dies after the first portion.
    await run.store.call(replace(commands.checkpoint(run.run_id, run.term, 1), rest=None))
    assert await run.command("HLEN", index_key(run.run_id, "tasks")) > 0
    await run.check()
    assert await run.command("HLEN", index_key(run.run_id, "tasks")) == 0
    assert await run.payload_keys() == set()


async def test_resume_replays_what_was_not_committed(run: Run) -> None:
    await run.create()
    first, second = await steps(run, 2)
    await run.publish(1, commit_through=0)
    resumed = await run.resume()
    assert (resumed.term, resumed.next_step, resumed.next_unassembled_step) == (2, 1, 2)
    assert (resumed.version, resumed.cursor, resumed.feeder_state) == (1, 0, b"")
    assert (await run.batch(1)).shard == second.shard
    assert (await run.batch(0)).shard == first.shard
    assert await run.bodies(await run.batch(1)) == [b"body-s1a", b"body-s1b"]
    zombie = ops.Pull(1, 1, 0, 1, None)
    with pytest.raises(StaleTerm):
        await run.store.call(commands.pull(run.run_id, zombie))


async def test_resume_takes_trained_steps_back(run: Run) -> None:
    await run.create()
    batches = await steps(run, 3)
    await run.publish(1, commit_through=0)
    await run.publish(2, commit_through=2)
    resumed = await run.resume(1)
    assert (resumed.next_step, resumed.next_unassembled_step, resumed.version) == (1, 3, 1)
    assert await run.ledger() == {"accepted": 6, "trained": 2, "delivered": 4}
    assert (await run.store.call(commands.weights(run.run_id))).manifest == b"manifest-1"
    assert [(await run.batch(step)).shard for step in (1, 2)] == [b.shard for b in batches[1:]]
    assert (await run.publish(2, commit_through=1)).committed_steps == 2
    await run.check()


async def test_a_repeated_resume_gives_the_same_term(run: Run) -> None:
    await run.create()
    await run.submit("a")
    first = await run.resume(request_id="same")
    again = await run.resume(request_id="same")
    assert again == first
    assert (first.cursor, first.feeder_state) == (1, b"feeder")


async def test_requeued_groups_go_back_in_order_and_the_caps_hold(run: Run) -> None:
    await run.create(max_queued_groups=5)
    await steps(run, 3)
    await run.fill("q")
    await run.commit(0)
    resumed = await run.resume(0, REQUEUE)
    assert (resumed.next_step, resumed.next_unassembled_step) == (0, 0)
    assert await run.queue() == ["s1a/0", "s1b/0", "s2a/0", "s2b/0", "q/0"]
    assert await run.ledger() == {"accepted": 7, "queued": 5, "dropped_overflow": 2}
    assert [g.group_id for g in (await run.batch(0)).shard] == ["s1a/0", "s1b/0"]
    await run.check()


async def test_discarded_groups_are_gone(run: Run) -> None:
    await run.create()
    await steps(run, 2)
    await run.commit(0)
    await run.resume(1, DISCARD)
    assert await run.ledger() == {"accepted": 4, "trained": 2, "discarded": 2}
    await run.fill("n1", "n2")
    assert [g.group_id for g in (await run.batch(1)).shard] == ["n1/0", "n2/0"]
    await run.check()


async def test_resume_refuses_what_is_not_there(run: Run) -> None:
    await run.create()
    await steps(run, 2)
    with pytest.raises(StepAhead):
        await run.resume(3)
    await run.commit(1)
    await run.checkpoint(0)
    with pytest.raises(ReplayGap) as gap:
        await run.resume(0)
    assert gap.value.attributes == {"step": "0", "first_retained": "1"}
    assert (await run.view()).term == 1


async def test_freed_steps_can_be_assembled_anew(run: Run) -> None:
    await run.create(max_queued_groups=4, max_lookahead=0)
    await steps(run, 3)
    await run.publish(1, commit_through=2)
    await run.checkpoint(1)
    resumed = await run.resume(1, allow_regenerate=True)
    assert (resumed.next_step, resumed.next_unassembled_step) == (1, 1)
    assert await run.queue() == ["s2a/0", "s2b/0"]
    view = await run.view()
    assert (view.checkpointed_steps, view.committed_steps, view.next_step) == (1, 1, 1)
    assert [g.group_id for g in (await run.batch(1)).shard] == ["s2a/0", "s2b/0"]
    await run.check()


async def test_resume_clamps_heads_to_the_fork(run: Run) -> None:
    await run.create(max_staleness=3, max_queued_groups=9)
    await run.fill("a", "b", head=0, tail=2)
    await run.batch(0)
    await run.publish(2, commit_through=0)
    await run.publish(6)
    await run.fill("c", "d", head=5, tail=6)
    await run.resume(0)
    replayed = await run.batch(0)
    assert [(g.head_version, g.tail_version) for g in replayed.shard] == [(0, 0), (0, 0)]
    await run.publish(4, commit_through=0)
    short = await run.pull(1)
    assert isinstance(short, ops.Short)
    assert await run.ledger() == {"accepted": 4, "trained": 2, "dropped_stale": 2}


async def test_another_world_size_shards_replayed_steps_anew(run: Run) -> None:
    await run.create(batch_groups=4)
    await run.push(*(run.group(f"t{i}", tokens=10 * i + 1) for i in range(4)))
    whole = await run.batch(0)
    await run.resume(0)
    halves = [await run.batch(0, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(g.sequence for half in halves for g in half.shard) == [g.sequence for g in whole.shard]
    assert [half.shard_tokens for half in halves] == [32, 32]
    assert (await run.view()).world_size == 2
    await run.commit(0)
    await run.checkpoint(0)
    await run.check()


async def test_manifests_are_kept_as_far_back_as_a_resume_can_go(run: Run) -> None:
    await run.create(retained_steps=100)
    for step in range(4):
        await steps(run, 1, step)
        await run.publish(step + 1, commit_through=step)
    await run.checkpoint(2)
    assert sorted(await run.command("HKEYS", index_key(run.run_id, "manifests"))) == [b"3", b"4"]
    await run.resume(3)
    assert (await run.store.call(commands.weights(run.run_id))).manifest == b"manifest-3"
    assert await run.command("HKEYS", index_key(run.run_id, "manifests")) == [b"3"]


async def test_leases_survive_a_resume(run: Run) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    await run.resume()
    assert await run.push_kinds(run.group(lease, head=weights(0))) == ["queued"]


async def test_lookahead_is_set_back_with_the_steps(run: Run) -> None:
    await run.create(max_lookahead=1, max_queued_groups=9)
    await steps(run, 2)
    await run.submit("a")
    assert (await run.lease()).wait is ops.LeaseWait.AT_CAPACITY
    await run.resume(1, DISCARD)
    assert len((await run.lease()).grants) == 1
