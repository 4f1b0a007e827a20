"""Errors of infrastructure, which are tried again, beside errors of the policy, which are trained; limits by
environment.
"""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from rollout_workers.episode import Episode
from rollout_workers.errors import InfrastructureError, PolicyError, retry_after_s_of
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.limits import Limits, LimitsOfTasks, parsed
from rollout_workers.rewards import RewardInput
from tests.workers.building import task
from tests.workers.fake_service import FakeService
from tests.workers.scene import Scene, two_turns
from tests.workers.test_rewards import progress_of, scorer_of
from tests.workers.working import working

WORKERS = Limits(1_800.0, 60.0, 3)


def test_limits_of_a_task_come_before_its_environments_and_those_before_the_workers() -> None:
    limits = LimitsOfTasks(
        WORKERS, parsed(["code.reward_timeout_s=600", "code.max_sample_attempts=5", "a.b.generate_timeout_s=2.5"])
    )
    assert limits.of(task(environment="math")) == WORKERS
    assert limits.of(task(environment="code")) == Limits(1_800.0, 600.0, 5)
    assert limits.of(task(environment="a.b")) == Limits(2.5, 60.0, 3)
    own = limits.of(task(environment="code", reward_timeout_ms=1_500, sample_attempts=1))
    assert own == Limits(1_800.0, 1.5, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        *("code", "code.reward_timeout_s", "reward_timeout_s=3", "code.x=3"),
        *("code.reward_timeout_s=0", "code.max_sample_attempts=1.5"),
    ],
)
def test_limits_that_cannot_be_are_named(wrong: str) -> None:
    with pytest.raises(InvalidField, match="environment_limits"):
        parsed([wrong])


async def test_wrong_answer_has_its_reward_and_name_wherever_the_function_runs() -> None:
    def plain(sample: RewardInput) -> float:
        if sample.sample_index == 1:
            raise PolicyError("no_answer", {"reward": -1.0, "right": 0.0})
        return {"reward": 1.0, "right": 1.0}  # type: ignore[return-value]

    async def coroutine(sample: RewardInput) -> float:
        return plain(sample)

    for function in (plain, coroutine):
        scores = await scorer_of(function).score(progress_of(2, 3), [0, 1])
        assert (scores.rewards, scores.named, scores.failures) == ({0: 1.0, 1: -1.0}, {1: "no_answer"}, {})
        assert scores.columns[1].keys() == {"right"}


async def test_task_has_its_own_time_for_rewards() -> None:
    def slow(sample: RewardInput) -> float:
        time.sleep(0.05)
        return 1.0

    scorer = scorer_of(slow, timeout_s=0.001)
    assert (await scorer.score(progress_of(2), [0], timeout_s=10.0)).rewards == {0: 1.0}
    assert "no result within 0.001 s" in str((await scorer.score(progress_of(2), [0])).failures[0])


async def test_rollout_function_that_names_an_error_ends_the_sample_there() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        if episode.sample_index == 2:
            raise PolicyError("bad_call", -0.5)
        episode.finish()
        return 1.0

    scene = Scene(rollout)
    assert await scene.run()
    header, _ = scene.group()
    assert [sample.reward for sample in header.samples] == [1.0, 1.0, -0.5, 1.0]
    assert [sample.failure for sample in header.samples] == ["", "", "bad_call", ""]
    kept = scene.progress.to_partial_rollout("w")
    assert kept is not None
    again = Scene(two_turns, partial_rollout=kept)
    assert await again.run()
    assert again.group()[0].samples[2].failure == "bad_call", "whoever goes on knows it"


def test_retry_waits_as_long_as_the_error_says() -> None:
    attempts = Attempts(3)
    error = InfrastructureError("429", retry_after_s=30.0)
    assert attempts.failed(0, error)
    assert attempts.wait_s(0) == 30.0
    assert attempts.failed(0, ValueError())
    assert attempts.wait_s(0) < 1.0
    assert InfrastructureError("", retry_after_s=1e9).retry_after_s == 600.0
    with pytest.raises(InvalidField, match="a-z0-9_"):
        PolicyError("No answer")


@pytest.mark.parametrize(
    ("wish", "waits"), [(None, 0.0), ("soon", 0.0), (-1.0, 0.0), (math.nan, 0.0), (7, 7.0), (1e9, 600.0)]
)
def test_wish_of_a_librarys_error_to_wait_is_bounded(wish: object, waits: float) -> None:
    error = ConnectionError("429")
    error.retry_after_s = wish  # type: ignore[attr-defined]
    assert retry_after_s_of(error) == waits


async def test_failed_attempts_are_never_trained_and_counted_by_environment(fake: FakeService, tmp_path: Path) -> None:
    tried: Counter[int] = Counter()

    def reward(sample: RewardInput) -> float:
        tried[sample.sample_index] += 1
        if sample.sample_index == 0 and tried[0] == 1:
            raise InfrastructureError("the sandbox is full", retry_after_s=0.01)
        if sample.sample_index == 1:
            raise PolicyError("does_not_compile", 0.25)
        return 1.0

    await fake.submit(task("t1", environment="code", max_new_tokens=16))
    async with working(fake, tmp_path, reward=reward) as running:
        await fake.until(lambda: "t1" in fake.results())
        counters = running.worker.counters
    samples = fake.results()["t1"].header.samples
    assert [(sample.reward, sample.failure) for sample in samples] == [
        (1.0, ""),
        (0.25, "does_not_compile"),
        (1.0, ""),
        (1.0, ""),
    ]
    assert (counters.infrastructure_errors, counters.policy_errors) == (
        {"code": 1},
        {("code", "does_not_compile"): 1},
    )
    assert not fake.returns


async def test_attempts_of_an_environment_are_its_own(fake: FakeService, tmp_path: Path) -> None:
    def reward(sample: RewardInput) -> float:
        raise InfrastructureError("the judge is down")

    await fake.submit(task("t1", environment="code", max_new_tokens=16))
    made: dict[str, Any] = {"environment_limits": ("code.max_sample_attempts=1",)}
    async with working(fake, tmp_path, reward=reward, **made) as running:
        await fake.until(lambda: bool(fake.returns))
        assert running.worker.counters.infrastructure_errors["code"] == 4
    assert "the judge is down" in fake.returns[0].error
