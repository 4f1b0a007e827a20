"""One sample that fails is generated again, not its group: within the lease, and by whoever goes on with it."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.errors import EngineRejected, EngineUnavailable
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import GeneratedSample, SampleRequest
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.rewards import RewardInput
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.rollout import SingleTurn
from rollout_workers.tasks.work import Stage
from tests.engine.fake_sglang import FakeSglang, answer, ok
from tests.workers.building import lease, task, time_passes
from tests.workers.fake_service import FakeService
from tests.workers.working import all_done, failed_return, working

PROMPT = np.array([1, 2, 3], np.int32)
ONE_MORE = {0: 1, 1: 1, 2: 2, 3: 1}
"""Times that each of four samples is generated when the third has to be generated again."""


class Picky(SimulatedEngine):
    """Refuses calls with sample 2, as often as told; nothing of such a call is generated."""

    def __init__(self, options: SimulatedEngineOptions) -> None:
        super().__init__(options)
        self.refusals = 0
        self.error: Exception = EngineRejected("e", "generating", 400, "it does not like it")
        self.calls: list[list[int]] = []

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        self.calls.append([request.sample_index for request in requests])
        if self.refusals and 2 in self.calls[-1]:
            self.refusals -= 1
            raise self.error
        return await super().generate(requests, deadline_s=deadline_s)


async def turn_of(
    *, most: int = 3, timeout_s: float = 30.0, length: float = 20, progress: GroupProgress | None = None
) -> tuple[SingleTurn, Picky, EngineSlot]:
    engine = Picky(
        SimulatedEngineOptions(tokens_per_s=1e4, answers=AnswerOptions(length_median=length, length_sigma=0))
    )
    slot = EngineSlot("e", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    progress = progress or GroupProgress(lease(task(max_new_tokens=10_000)), PROMPT)
    return SingleTurn(progress, slot, Attempts(most), timeout_s=timeout_s), engine, slot


# ── generation ───────────────────────────────────────────────────────────────


async def test_unusable_answer_is_asked_for_again_alone() -> None:
    turn, engine, slot = await turn_of()
    engine.fail_samples(2, 1)
    assert await turn.run()
    assert engine.answered == ONE_MORE
    assert engine.calls == [[0, 1, 2, 3], [2]]
    assert slot.errors == 1


async def test_sample_that_takes_its_batch_with_it_is_found_by_asking_for_each_alone() -> None:
    turn, engine, _ = await turn_of()
    engine.refusals = 2
    assert await turn.run()
    assert engine.answered == {0: 1, 1: 1, 2: 1, 3: 1}
    assert engine.calls[0] == [0, 1, 2, 3]
    assert Counter(map(tuple, engine.calls[1:])) == {(0,): 1, (1,): 1, (2,): 2, (3,): 1}


async def test_sample_that_always_fails_is_given_up_and_its_siblings_are_kept_for_the_next() -> None:
    turn, engine, _ = await turn_of()
    engine.fail_samples(2, 99)
    with pytest.raises(SamplesFailed, match=r"sample 2 was given up: .*a fault was injected"):
        await turn.run()
    assert engine.answered == {0: 1, 1: 1, 2: 3, 3: 1}
    kept = turn.progress.to_partial_rollout("w")
    assert kept is not None

    progress = GroupProgress(lease(task(max_new_tokens=10_000), attempt=2, partial_rollout=kept), PROMPT)
    assert progress.take_partial_rollout() is None
    second, other, _ = await turn_of(progress=progress)
    assert await second.run()
    assert other.answered == {2: 1}
    for before, after in zip(turn.progress.samples, second.progress.samples, strict=True):
        assert before.finish is None or before.output_ids.tolist() == after.output_ids.tolist()


async def test_one_attempt_is_no_second_one() -> None:
    turn, engine, _ = await turn_of(most=1)
    engine.fail_samples(2, 1)
    with pytest.raises(SamplesFailed):
        await turn.run()
    assert engine.answered == {0: 1, 1: 1, 2: 1, 3: 1}


async def test_request_that_must_not_be_sent_is_not_tried_again() -> None:
    turn, engine, _ = await turn_of()
    engine.refusals, engine.error = 99, InvalidField("top_k", 1, "less")
    with pytest.raises(SamplesFailed, match="top_k"):
        await turn.run()
    assert engine.calls == [[0, 1, 2, 3]]


async def test_what_is_not_finished_in_time_goes_on_alone_from_where_it_was() -> None:
    progress = GroupProgress(lease(task(max_new_tokens=4_500)), PROMPT)
    turn, engine, _ = await turn_of(timeout_s=0.3, length=4_000, progress=progress)
    assert await turn.run()
    assert engine.calls[0] == [0, 1, 2, 3]
    assert sorted(engine.calls[-4:]) == [[0], [1], [2], [3]]
    # In 0.3 s there were at most 3,000 of them.
    assert [len(sample) for sample in turn.progress.samples] == [4_500] * 4


async def test_sample_that_is_never_finished_in_time_is_given_up_with_its_tokens() -> None:
    turn, _, _ = await turn_of(timeout_s=0.1, length=9_000, most=2)
    with pytest.raises(SamplesFailed, match=r"were not finished in 0\.1 s"):
        await turn.run()
    assert all(len(sample) > 500 for sample in turn.progress.samples)


async def test_lost_engine_is_not_tried_again() -> None:
    turn, engine, slot = await turn_of()
    engine.refusals, engine.error = 99, EngineUnavailable("e", "generating", "it died")
    running = asyncio.create_task(turn.run())
    await slot.changes.until(lambda: slot.suspect)
    # What the guard does when a probe fails.
    slot.move(Event.LOST)
    with pytest.raises(SamplesFailed, match="it died"):
        await asyncio.wait_for(running, 5)
    assert engine.calls == [[0, 1, 2, 3]]


async def test_engine_that_still_answers_after_a_broken_connection_is_tried_again() -> None:
    turn, engine, slot = await turn_of()
    engine.refusals, engine.error = 1, EngineUnavailable("e", "generating", "connection reset")
    running = asyncio.create_task(turn.run())
    await slot.changes.until(lambda: slot.suspect)
    await time_passes(0.5)
    assert engine.calls == [[0, 1, 2, 3]]
    slot.move(Event.ANSWERED)
    assert await asyncio.wait_for(running, 5)


async def test_stop_does_not_wait_for_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.generation.attempts.FIRST_WAIT_S", 60.0)
    monkeypatch.setattr("rollout_workers.generation.attempts.LONGEST_WAIT_S", 60.0)
    turn, engine, slot = await turn_of()
    engine.fail_samples(2, 1)
    running = asyncio.create_task(turn.run())
    await slot.changes.until(lambda: slot.errors == 1)
    await turn.stop()
    assert not await asyncio.wait_for(running, 5)
    assert turn.progress.unfinished == [2]


async def test_one_bad_entry_of_a_reply_costs_no_sibling() -> None:
    bad = True

    async def reply(body: Any) -> Any:
        nonlocal bad
        if body.get("token_ids_logprob"):
            return await ask_vocabulary(body)
        entries = [answer(rid, [7, 8]) for rid in body["rid"]]
        if bad:
            bad = False
            entries[1]["meta_info"]["output_token_logprobs"] = [[None, 7, None], [-0.5, 8, None]]
        return ok(entries)

    async with FakeSglang() as fake:
        ask_vocabulary = fake.handlers["/generate"]
        fake.handlers["/generate"] = reply
        engine = SglangEngine(fake.url)
        slot = EngineSlot("e", engine, await engine.info(), base_model=None)
        slot.adopt(slot.loaded)
        progress = GroupProgress(lease(task()), PROMPT)
        assert await SingleTurn(progress, slot, Attempts(3), timeout_s=20).run()
        asked = [len(body["rid"]) for body in fake.received["/generate"] if "rid" in body]
        await engine.close()
    assert asked == [4, 1]
    assert [sample.output_ids.tolist() for sample in progress.samples] == [[7, 8]] * 4


# ── rewards ──────────────────────────────────────────────────────────────────


class Judge:
    """A reward function that fails for sample 2, as often as told, or for all."""

    def __init__(self, failures: int, *, everybody: bool = False) -> None:
        self.failures = failures
        self.everybody = everybody
        self.asked: Counter[int] = Counter()
        self.responses: list[list[int]] = []

    async def __call__(self, sample: RewardInput) -> float:
        self.asked[sample.sample_index] += 1
        if sample.sample_index == 2 or self.everybody:
            self.responses.append(sample.response_ids.tolist())
            if self.failures > 0:
                self.failures -= 1
                raise OSError("the judge is confused")
        return 1.0


async def test_failed_reward_is_asked_for_again_alone(fake: FakeService, tmp_path: Path) -> None:
    judge = Judge(1)
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=judge) as running:
        await fake.until(all_done(fake))
        assert running.engine.answered == {0: 1, 1: 1, 2: 1, 3: 1}
        assert running.worker.counters.samples_again == 1
    assert judge.asked == ONE_MORE
    assert fake.returns == []


async def test_response_whose_reward_fails_twice_is_generated_again_alone(fake: FakeService, tmp_path: Path) -> None:
    judge = Judge(2)
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=judge) as running:
        await fake.until(all_done(fake))
        assert running.engine.answered == ONE_MORE
        assert running.worker.counters.samples == 5
    assert judge.asked == {0: 1, 1: 1, 2: 3, 3: 1}
    assert fake.returns == []


async def test_sample_without_a_reward_goes_back_without_its_response(fake: FakeService, tmp_path: Path) -> None:
    fake.retry_failed = True
    judge = Judge(3)
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=judge) as running:
        returned = await failed_return(fake)
        await fake.until(all_done(fake))
        # Twice under the first lease, once more under the second; its siblings but once.
        assert running.engine.answered == {0: 1, 1: 1, 2: 3, 3: 1}
    assert "sample 2 was given up" in returned.error
    assert finishes(returned.partial_rollout) == ["STOP", "STOP", "ABORTED", "STOP"]


async def test_judge_that_is_down_throws_no_response_away(fake: FakeService, tmp_path: Path) -> None:
    judge = Judge(99, everybody=True)
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=judge) as running:
        returned = await failed_return(fake)
        assert running.engine.answered == {0: 1, 1: 1, 2: 1, 3: 1}
    assert finishes(returned.partial_rollout) == ["STOP"] * 4
    assert judge.asked == {0: 3, 1: 3, 2: 3, 3: 3}


async def test_sample_that_takes_too_long_to_score_does_not_fail_the_ones_after_it(
    fake: FakeService, tmp_path: Path
) -> None:
    asked: Counter[int] = Counter()

    def reward(sample: RewardInput) -> float:
        asked[sample.sample_index] += 1
        if sample.sample_index == 1 and asked[1] == 1:
            time.sleep(1.0)  # A function that hangs for a while.
        return 1.0

    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=reward, reward_timeout_s=0.3) as running:
        await fake.until(all_done(fake))
        assert running.engine.answered == {0: 1, 1: 1, 2: 1, 3: 1}
    assert asked == {0: 1, 1: 2, 2: 1, 3: 1}


# ── the whole worker ─────────────────────────────────────────────────────────


async def test_given_up_sample_is_all_that_the_next_lease_generates(fake: FakeService, tmp_path: Path) -> None:
    fake.retry_failed = True
    await fake.submit(task("t1"))
    async with working(fake, tmp_path) as running:
        running.engine.fail_samples(2, 3)
        returned = await failed_return(fake)
        await fake.until(all_done(fake))
        assert running.engine.answered == {0: 1, 1: 1, 2: 4, 3: 1}
        counters = running.worker.counters
        assert (counters.samples, counters.samples_again, counters.partial_rollouts) == (4, 2, 1)
    assert returned.kind == tasks_pb2.RETURN_KIND_FAILED
    assert finishes(returned.partial_rollout) == ["STOP", "STOP", "ABORTED", "STOP"]
    assert fake.results()["t1"].header.lease_id == "t1/0/2"


async def test_dead_worker_costs_no_more_than_what_its_lease_had_not_handed_back(
    fake: FakeService, tmp_path: Path
) -> None:
    """A sample that fails keeps its siblings out of harm only once they are handed back."""
    fake.retry_failed = True
    await fake.submit(task("t1", max_new_tokens=40))
    simulated = SimulatedOptions(tokens_per_s=2_000.0, length_median=30.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated, max_sample_attempts=1) as first:
        first.engine.fail_samples(2, 1)
        await failed_return(fake)
        await first.end()
    async with working(fake, tmp_path, simulated=simulated, worker_id="w2") as second:
        await fake.until(all_done(fake))
        answered = second.engine.answered
    assert first.engine.answered + answered == Counter({0: 1, 1: 1, 2: 2, 3: 1})


async def test_lease_that_is_lost_before_a_sample_is_generated_again_ends_there(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.ttl_ms = 300
    monkeypatch.setattr("rollout_workers.generation.attempts.FIRST_WAIT_S", 1.0)
    judge = Judge(2)
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=judge) as running:
        await fake.until(lambda: bool(fake.tasks["t1"].leased_to))
        dispatcher = running.worker._seats.dispatchers
        await fake.until(
            lambda: any(work.stage is Stage.SCORING for d in dispatcher for work in d._leases.works.values())
        )
        fake.lost_leases.add("t1/0/1")
        await fake.until(lambda: running.worker.counters.leases_lost == 1)
        assert running.engine.answered == {0: 1, 1: 1, 2: 1, 3: 1}
    assert fake.returns == []
    assert fake.results() == {}


def finishes(group: groups_pb2.Group) -> list[str]:
    return [
        groups_pb2.FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_")
        for sample in group.header.samples
    ]
