"""Tests of what goes wrong in a worker, against a fake of the service: bad tasks and rewards, lost engines and
services.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.limits import MAX_ERROR_CHARS
from rollout_buffer.v1 import groups_pb2, tasks_pb2, weights_pb2
from rollout_workers.engine.errors import EngineNotStarted, EngineUnavailable
from rollout_workers.engine.simulated.hosts import own_hosts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.rewards import RewardInput, Scorer, Scores
from rollout_workers.worker import Worker
from tests.workers.building import eventually, options, task, time_passes, weight_files
from tests.workers.fake_service import FakeService
from tests.workers.working import SLOW, all_done, failed_return, working


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"prompt_token_ids": [1, 5_000]}, "prompt_token_ids is 'token id 5000'"),
        ({"messages": [tasks_pb2.ChatMessage(role="user", content="hi")]}, "messages need a tokenizer"),
    ],
)
async def test_prompt_that_cannot_be_used_fails_its_task_alone(
    fake: FakeService, tmp_path: Path, bad: dict[str, Any], error: str
) -> None:
    await fake.submit(task("bad", **bad), task("good"))
    async with working(fake, tmp_path):
        returned = await failed_return(fake)
        await fake.until(lambda: "good" in fake.results())
    assert returned.lease_id == "bad/0/1"
    assert error in returned.error
    assert not returned.HasField("partial_rollout")


async def test_failed_reward_keeps_the_samples(fake: FakeService, tmp_path: Path) -> None:
    def reward(sample: RewardInput) -> float:
        raise ValueError("no answer in the metadata")

    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=reward) as running:
        returned = await failed_return(fake)
        assert running.worker.counters.last_error == returned.error
    assert "for sample 0: ValueError: no answer in the metadata" in returned.error
    assert len(returned.partial_rollout.header.samples) == 4


async def test_invalid_group_fails_its_task_with_the_services_error(fake: FakeService, tmp_path: Path) -> None:
    fake.outcomes.append(groups_pb2.PUSH_OUTCOME_INVALID)
    await fake.submit(task("t1"), task("t2"))
    async with working(fake, tmp_path):
        returned = await failed_return(fake)
        await fake.until(lambda: len(fake.results()) == 1)
    assert returned.error == "the group breaks a rule"
    assert not returned.HasField("partial_rollout")


async def test_fault_of_the_worker_over_one_task_fails_that_task_alone(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Scorer.score

    async def score(
        self: Scorer, progress: GroupProgress, indices: Sequence[int], *, timeout_s: float | None = None
    ) -> Scores:
        if progress.task.task_id == "bad":
            raise ZeroDivisionError("a bug")
        return await original(self, progress, indices, timeout_s=timeout_s)

    monkeypatch.setattr(Scorer, "score", score)
    await fake.submit(task("bad"), task("good"))
    async with working(fake, tmp_path):
        returned = await failed_return(fake)
        await fake.until(lambda: "good" in fake.results())
    assert returned.error == "ZeroDivisionError: a bug"


async def test_engine_that_dies_fails_its_tasks_and_works_again_when_it_is_back(
    fake: FakeService, tmp_path: Path
) -> None:
    await fake.submit(task("t1", max_new_tokens=5_000))
    files = weight_files(tmp_path / "v1", {"model": b"1"})
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
    async with working(fake, tmp_path, simulated=SLOW) as running:
        await eventually(lambda: bool(running.engine._decoding))
        await running.engine.die()
        returned = await failed_return(fake)
        assert "it died" in returned.error
        asked = len(fake.lease_requests)
        await fake.submit(task("t2", max_new_tokens=4))
        await time_passes(0.3)
        # The dead engine is given nothing, however many tasks wait: at most the request under way brings one.
        assert len(fake.lease_requests) <= asked + 1
        assert not fake.tasks["t2"].failed
        await running.engine.revive()
        await fake.until(lambda: "t2" in fake.results())
    spans = fake.results()["t2"].header.samples[0].spans
    assert [span.version.version for span in spans] == [1]


async def test_engine_that_was_started_anew_between_two_probes_is_loaded_again(
    fake: FakeService, tmp_path: Path
) -> None:
    files = weight_files(tmp_path / "v1", {"model": b"1"})
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.lease_requests))
        await running.engine.revive()
        running.worker.slots[0].failed(EngineUnavailable("e", "generating", "Server disconnected"), suspect=True)
        await fake.until(lambda: fake.reports[-1].reloads == 2)
        await fake.submit(task("t1"))
        await fake.until(all_done(fake))
    assert [span.version.version for span in fake.results()["t1"].header.samples[0].spans] == [1]


async def test_error_of_any_length_is_reported_as_far_as_the_service_takes_it(
    fake: FakeService, tmp_path: Path
) -> None:
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.reports))
        slot = running.worker.slots[0]
        while not slot.breaker.is_open:
            slot.breaker.failed()
        slot.failed(EngineNotStarted("e0", "it ended with exit code 1", "e0.log", 3_000 * "x"))
        await fake.until(lambda: fake.engine().last_error.startswith("no work after"))
        assert not running.running.done()
    assert len(fake.engine().last_error) == MAX_ERROR_CHARS


async def test_service_that_never_answers_ends_the_worker(fake: FakeService, tmp_path: Path) -> None:
    await fake.stop()
    made = options(fake.address, tmp_path, service_timeout_s=0.5)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(Worker(made).run(), 20)
    faults = caught.value.exceptions
    assert {getattr(fault, "reason", "") for fault in faults} == {"service_unreachable"}
    assert any("waiting on the service at" in note for fault in faults for note in getattr(fault, "__notes__", ()))


async def test_engine_that_never_comes_ends_the_worker(fake: FakeService, tmp_path: Path) -> None:
    made = options(fake.address, tmp_path, simulated=None, engine_urls=("http://127.0.0.1:9",), engine_timeout_s=0.3)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(Worker(made).run(), 20)
    assert "not ready after 0.3 s" in str(caught.value.exceptions[0])


async def test_lost_engines_end_the_worker_when_none_comes_back(fake: FakeService, tmp_path: Path) -> None:
    made = options(fake.address, tmp_path, engine_timeout_s=0.3)
    (host,) = own_hosts(made)
    worker = Worker(made, hosts=[host])
    running = asyncio.create_task(worker.run())
    await fake.until(lambda: bool(fake.lease_requests))
    await host.engine.die()
    worker.slots[0].failed(EngineUnavailable("e", "probing", "it died"), suspect=True)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 20)
    assert "no engine was reachable for 0.3 s" in str(caught.value.exceptions[0])
