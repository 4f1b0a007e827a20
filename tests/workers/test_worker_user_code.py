"""Reward and rollout functions in a worker process, with the real service: turns, errors and processes."""

import dataclasses
import re
from pathlib import Path

import pytest

from buffer_wire.errors import FailureBudgetExceeded
from tests.support.service import ServiceProcess
from tests.workers.process import worker_process
from tests.workers.training import FAST, OPTIONS, endless, until
from trainer_client import BufferClient, Policy, SamplingParams, Task


def test_turns_of_a_rollout_function_reach_the_trainer(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    flags = ("--rollout", "tests.workers.rollout_functions:two_turns")
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, *flags),
        client.session(run_id, policy=Policy(batch_groups=4), tasks=endless(), options=OPTIONS) as session,
    ):
        batch = next(iter(session))
    for sample in batch.samples:
        assert sample.reward == sample.loss_mask.sum() <= 16
        assert sample.loss_mask[sample.prompt_len :].sum() == sample.tokens - sample.prompt_len - 2


def test_reward_that_fails_ends_in_a_failed_task_with_its_error(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    bad = Task(group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 9_999], task_id="bad")
    good = Task(group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2], task_id="good")
    policy = Policy(batch_groups=1, max_attempts=2, retry_backoff_ms=10)
    with (
        worker_process(service.address, run_id, tmp_path, *FAST) as worker,
        client.session(run_id, policy=policy, tasks=[bad, good], options=OPTIONS) as session,
    ):
        assert [group.task_id for group in next(session).groups] == ["good"]
        until(lambda: client.ledger(run_id).tasks.failed == 1, "the bad task has failed")
        assert worker.stop() == 0
    failure = client.run(run_id).failures[0]
    assert (failure.task_id, failure.attempts) == ("bad", 2)
    assert "token id 9999" in failure.error


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--reward", "tests.workers.reward_functions:broken"), "PermissionError: the judge does not know us"),
        (
            ("--reward", "tests.workers.reward_functions:broken", "--reward-processes", "1"),
            "PermissionError: the judge does not know us",
        ),
        (
            ("--rollout", "tests.workers.rollout_functions:broken"),
            "ConnectionError: the sandbox does not answer",
        ),
    ],
    ids=["thread", "process", "rollout"],
)
def test_error_of_user_code_stops_the_trainer(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    policy = Policy(batch_groups=4, max_attempts=2, retry_backoff_ms=100, failure_budget=1)
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, "--max-sample-attempts", "1", *flags),
        client.session(run_id, policy=policy, tasks=endless(), options=OPTIONS) as session,
    ):
        with pytest.raises(FailureBudgetExceeded) as caught:
            next(iter(session))
        assert why in str(caught.value)
        assert int(caught.value.attributes["failed"]) >= 2
        state = client.run(run_id)
    assert state.paused == "failure_budget_exceeded"
    assert state.ledger.tasks.failed >= 2


def test_stopped_worker_leaves_no_reward_process_behind(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    flags = ("--reward", "tests.workers.reward_functions:obedient", "--reward-processes", "2")
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, *flags) as worker,
        client.session(run_id, policy=Policy(batch_groups=4), tasks=endless(), options=OPTIONS) as session,
    ):
        next(iter(session))
        pids = re.findall(r"reward process started.*pid=(\d+)", worker.said())
        assert pids
        assert worker.stop() == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are gone")


def test_killed_worker_leaves_no_reward_process_behind(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    flags = ("--reward", "tests.workers.reward_functions:obedient", "--reward-processes", "1")
    tasks = (dataclasses.replace(task, metadata={"0": "hang"}) for task in endless())
    with (
        worker_process(service.address, run_id, tmp_path, *FAST, *flags) as worker,
        client.session(run_id, policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS),
    ):
        until(lambda: "reward process started" in worker.said(), "a process is started")
        (pid, *_) = re.findall(r"reward process started.*pid=(\d+)", worker.said())
        worker.kill()
        until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone, though the function hangs")
