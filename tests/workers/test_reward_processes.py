"""Reward functions in processes: what one call does to its process costs that call only."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from rollout_workers.generation.prompts import Prompts
from rollout_workers.options import AgentOptions
from rollout_workers.rewarding.processes import RewardProcesses
from rollout_workers.rewards import Scorer, Scores, load_reward
from rollout_workers.worker import Worker
from tests.workers.building import eventually, options, task
from tests.workers.fake_service import FakeService
from tests.workers.test_rewards import ByteTokenizer, progress_of
from tests.workers.working import working

OBEDIENT = "tests.workers.reward_functions:obedient"


@asynccontextmanager
async def scoring(
    function: str = OBEDIENT, *, count: int = 2, timeout_s: float = 20.0, decode: bool = False
) -> AsyncIterator[tuple[Scorer, RewardProcesses]]:
    processes = RewardProcesses(function, count=count, timeout_s=timeout_s)
    scorer = Scorer(
        load_reward(function),
        Prompts("model", load=lambda _: ByteTokenizer()),
        name=function,
        timeout_s=timeout_s,
        threads=1,
        decode=decode,
        processes=processes,
    )
    try:
        yield scorer, processes
    finally:
        await scorer.close()


async def scored(scorer: Scorer, *what: str, group: int = 4) -> Scores:
    """Scores of samples with 1, 2, … tokens; `what[i]` is what the function does with sample i."""
    orders = json.dumps({str(i): order for i, order in enumerate(what)})
    progress = progress_of(*range(1, group + 1), metadata_json=orders)
    return await scorer.score(progress, range(group))


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_samples_go_to_processes_of_their_own() -> None:
    async with scoring() as (scorer, processes):
        scores = await scored(scorer, "pid", "pid", "pid", "pid")
        assert not scores.failures
        assert {int(pid) for pid in scores.rewards.values()} == set(processes.pids)
        assert os.getpid() not in processes.pids
        assert len(processes.pids) == 2


async def test_sample_comes_over_whole() -> None:
    async with scoring("tests.workers.reward_functions:about", decode=True) as (scorer, _):
        progress = progress_of(2, metadata_json='{"a": [1]}', environment="sums")
        progress.samples[0].note_turn("assistant", "stop")
        assert (await scorer.score(progress, [0])).rewards == {0: 1.0}


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("die", "its process was ended by SIGSEGV"),
        ("exit", "its process ended with exit code 3"),
        ("raise", "ValueError: no such answer"),
        ("text", "it gave 'much', not a finite number"),
        ("object", "TypeError: Object of type object is not JSON serializable"),
    ],
)
async def test_failure_costs_its_own_sample_only(order: str, why: str) -> None:
    async with scoring(count=1) as (scorer, _):
        scores = await scored(scorer, "", order)
        assert scores.rewards == {0: 1.0, 2: 3.0, 3: 4.0}
        assert why in str(scores.failures[1])
        assert (await scored(scorer)).rewards == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}


async def test_function_that_hangs_is_killed_and_replaced() -> None:
    async with scoring(count=1, timeout_s=3.0) as (scorer, processes):
        await scored(scorer)
        (hung,) = processes.pids
        scores = await scored(scorer, "hang", group=3)
        assert scores.rewards == {1: 2.0, 2: 3.0}
        assert "no result within 3 s; its process was killed" in str(scores.failures[0])
        await eventually(lambda: gone(hung))
        assert len(processes.pids) == 1


async def test_call_that_is_given_up_does_not_answer_the_next_one() -> None:
    async with scoring(count=1) as (scorer, processes):
        await scored(scorer)
        asking = asyncio.create_task(scored(scorer, "hang", group=1))
        await eventually(processes._free.empty)
        asking.cancel()
        await asyncio.wait([asking])
        assert (await scored(scorer, group=2)).rewards == {0: 1.0, 1: 2.0}


async def test_close_leaves_no_process_behind() -> None:
    async with scoring() as (scorer, processes):
        await scored(scorer)
        pids = processes.pids
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


async def test_function_that_a_process_cannot_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scoring() as (scorer, processes):
        monkeypatch.setattr(processes, "_function", "no.such.module:f")
        scores = await scored(scorer, group=1)
        assert "its process cannot load it" in str(scores.failures[0])
        assert "No module named 'no'" in str(scores.failures[0])


async def test_worker_scores_in_processes_and_ends_them(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", metadata_json='{"2": "die"}' if i == 1 else "") for i in range(4)))
    made: dict[str, Any] = {"reward_processes": 2, "max_sample_attempts": 1}
    async with working(fake, tmp_path, judge=OBEDIENT, **made) as running:
        await fake.until(lambda: len(fake.results()) == 3 and len(fake.returns) == 1)
        scorer = running.worker._seats.dispatchers[0]._leases._tools.scorer
        assert scorer._processes is not None
        pids = scorer._processes.pids
        assert pids
    assert "was ended by SIGSEGV" in fake.returns[0].error
    assert all(gone(pid) for pid in pids)


def test_agent_whose_branches_are_rows_has_a_reward_function_that_looks_at_rows(tmp_path: Path) -> None:
    agent = AgentOptions("tests.workers.reward_functions:obedient", branches="rows")
    made = options("127.0.0.1:1", tmp_path, reward="tests.workers.reward_functions:obedient", agent=agent)
    with pytest.raises(InvalidField, match=r"agent_branches.*obedient does not say `rows = True`"):
        Worker(made)


def test_coroutine_is_not_for_processes(tmp_path: Path) -> None:
    made = options("127.0.0.1:1", tmp_path, reward="tests.workers.reward_functions:coroutine", reward_processes=1)
    with pytest.raises(InvalidField, match="the reward function is a coroutine"):
        Worker(made)
