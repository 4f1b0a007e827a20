"""Rollout functions in the whole worker: what is pushed, handed back, and handed on."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.episode import Episode
from rollout_workers.functions import Rollout
from rollout_workers.rewards import RewardInput
from tests.workers.building import options, task
from tests.workers.fake_service import FakeService
from tests.workers.working import all_done, given_back, working

QUICK = SimulatedOptions(tokens_per_s=5_000.0, length_median=8.0, length_sigma=0.0)


async def two_turns(episode: Episode) -> float:
    await episode.generate()
    episode.append("tool", ids=[7, 8])
    await episode.generate()
    episode.finish()
    return float(episode.sample_index)


async def leaves_the_reward(episode: Episode) -> None:
    await two_turns(episode)


async def test_groups_of_a_rollout_function_are_pushed_with_turns_and_rewards(
    fake: FakeService, tmp_path: Path
) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=64) for i in range(5)))
    async with working(fake, tmp_path, simulated=QUICK, rollout=Rollout("m:f", two_turns)) as running:
        await fake.until(all_done(fake))
    for group in fake.results().values():
        assert [sample.reward for sample in group.header.samples] == [0.0, 1.0, 2.0, 3.0]
        assert [[turn.role for turn in sample.turns] for sample in group.header.samples] == [
            ["assistant", "tool", "assistant"]
        ] * 4
        assert [sample.loss_tokens for sample in group.header.samples] == [16] * 4
    counters = running.worker.counters
    assert (counters.samples, counters.tokens, counters.tokens_pushed) == (20, 320, 320)


async def test_reward_function_scores_what_the_rollout_function_does_not(fake: FakeService, tmp_path: Path) -> None:
    seen: list[RewardInput] = []

    async def reward(sample: RewardInput) -> float:
        seen.append(sample)
        return 0.25

    await fake.submit(task("t1", max_new_tokens=64))
    rollout = Rollout("m:f", leaves_the_reward)
    async with working(fake, tmp_path, simulated=QUICK, rollout=rollout, reward=reward):
        await fake.until(all_done(fake))
    assert [sample.reward for sample in fake.results()["t1"].header.samples] == [0.25] * 4
    assert [turn.role for turn in seen[0].turns] == ["assistant", "tool", "assistant"]
    assert seen[0].turns[1].ids.tolist() == [7, 8]
    assert len(seen[0].response_ids) == 18


async def test_nobody_to_give_a_reward_is_an_error_that_says_so(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(task("t1", max_new_tokens=64))
    rollout = Rollout("m:f", leaves_the_reward)
    made: dict[str, Any] = {"simulated": QUICK, "rollout": rollout, "max_sample_attempts": 1}
    async with working(fake, tmp_path, judge="", **made):
        await fake.until(lambda: bool(fake.returns))
    assert "returned None (or let EpisodeFull pass), and the worker has no reward function" in fake.returns[0].error


async def test_stop_keeps_finished_siblings_and_another_worker_makes_the_others(
    fake: FakeService, tmp_path: Path
) -> None:
    stuck = asyncio.Event()

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        if episode.sample_index and not stuck.is_set():
            episode.append("tool", ids=[7])
            await stuck.wait()
        episode.finish()
        return 1.0

    await fake.submit(task("t1", max_new_tokens=64))
    made: dict[str, Any] = {"simulated": QUICK, "rollout": Rollout("m:f", rollout)}
    async with working(fake, tmp_path, **made) as first:
        await fake.until(lambda: bool(fake.tasks["t1"].leased_to))
        await first.worker._seats.dispatchers[0]._slot.changes.until(lambda: first.engine.answered.total() == 4)
        await first.end()
    (returned,) = given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)
    finishes = [sample.finish_reason for sample in returned.partial_rollout.header.samples]
    assert finishes == [groups_pb2.FINISH_REASON_STOP, *[groups_pb2.FINISH_REASON_ABORTED] * 3]
    counters = first.worker.counters
    assert (counters.tokens_returned, counters.tokens_discarded) == (8, Counter({"not_resumable": 24}))
    stuck.set()
    async with working(fake, tmp_path, worker_id="w2", **made) as second:
        await fake.until(all_done(fake))
        assert second.engine.answered == {1: 1, 2: 1, 3: 1}
    counters = second.worker.counters
    assert (counters.tokens_resumed, counters.tokens, counters.tokens_pushed) == (8, 24, 32)


async def test_stop_during_turns_is_no_failure_and_a_resumable_function_loses_nothing(
    fake: FakeService, tmp_path: Path
) -> None:
    class Turns:
        resumable = True

        async def __call__(self, episode: Episode) -> float:
            while sum(turn.role == "assistant" for turn in episode.turns) < 4:
                if episode.turns and episode.turns[-1].role == "assistant":
                    episode.append("tool", ids=[7])
                await episode.generate()
            episode.finish()
            return 1.0

    slow = SimulatedOptions(tokens_per_s=100.0, length_median=30.0, length_sigma=0.0)
    await fake.submit(*(task(f"t{i}", max_new_tokens=256) for i in range(3)))
    made: dict[str, Any] = {"rollout": Rollout("m:f", Turns())}
    async with working(fake, tmp_path, simulated=slow, **made) as first:
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 3)
        await first.worker._seats.dispatchers[0]._slot.changes.until(lambda: first.engine.answered.total() >= 12)
        await first.end()
    assert len(given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)) == 3
    assert first.worker.counters.tokens_discarded == {}
    kept = {i: t.partial_rollout for i, t in fake.tasks.items()}
    async with working(fake, tmp_path, worker_id="w2", simulated=QUICK, **made) as second:
        await fake.until(all_done(fake))
    assert second.worker.counters.partial_rollouts == 3
    for task_id, group in fake.results().items():
        before = kept[task_id]
        assert before is not None
        old = read_payload(before.header, before.payload)["token_ids"]
        at = 0
        for sample, ids in zip(before.header.samples, fake.tokens(task_id), strict=True):
            assert ids[: sample.tokens] == old[at : at + sample.tokens].tolist()
            at += sample.tokens
        assert [len(sample.turns) for sample in group.header.samples] == [7] * 4


async def test_lost_lease_cancels_its_functions(fake: FakeService, tmp_path: Path) -> None:
    fake.ttl_ms = 300
    ended: list[str] = []

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        if episode.task.task_id == "t1":
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(episode.task.task_id)
        episode.finish()
        return 1.0

    await fake.submit(task("t1", group_size=2))
    made: dict[str, Any] = {"simulated": QUICK, "rollout": Rollout("m:f", rollout)}
    async with working(fake, tmp_path, groups_per_engine=1, **made) as running:
        await fake.until(lambda: bool(fake.extends))
        fake.lost_leases.add("t1/0/1")
        await fake.submit(task("t2"))
        await fake.until(lambda: "t2" in fake.results())
        assert ended == ["t1", "t1"]
        assert running.worker.counters.leases_lost == 1


def test_worker_needs_someone_to_give_rewards(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="reward"):
        options("127.0.0.1:1", tmp_path, reward="")
    assert options("127.0.0.1:1", tmp_path, reward="", rollout="m:f").reward == ""
    with pytest.raises(InvalidField, match="not given together with a rollout function"):
        options("127.0.0.1:1", tmp_path, rollout="m:f", environment="verifiers:x")
    with pytest.raises(InvalidField, match="verifiers:NAME"):
        options("127.0.0.1:1", tmp_path, environment="gym:x")
