"""PRIME-RL's launch script: its commands are understood, its tasks and reward are what it names."""

import itertools
import re
import subprocess
from pathlib import Path

import numpy as np

from examples.prime_rl.arithmetic import GROUP_SIZE, reward, tasks
from rollout_workers.rewards import RewardInput
from tests.docs.pages import ROOT, shell_words
from tests.docs.test_commands import status_of

SCRIPT = ROOT / "examples" / "prime_rl" / "launch.sh"


def test_its_commands_are_understood() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    commands = [words for words in shell_words(SCRIPT.read_text()) if words[0] == "rollout-buffer"]
    assert [words[1] for words in commands] == ["serve", "worker", "bridge"]
    assert [status_of(words[1:]) for words in commands] == [0, 0, 0]
    named = re.findall(r"examples\.prime_rl\.(\w+):(\w+)", SCRIPT.read_text())
    assert named == [("arithmetic", "reward"), ("arithmetic", "tasks")]


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    ended = subprocess.run(["bash", str(SCRIPT)], env={}, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "a checkout of prime-rl" in ended.stderr


def test_its_tasks_are_the_same_each_time_and_its_reward_knows_the_answer() -> None:
    first, again = (list(itertools.islice(tasks(), 50)) for _ in range(2))
    assert first == again
    assert len({task.task_id for task in first}) == 50
    assert {task.group_size for task in first} == {GROUP_SIZE}

    def rewarded(text: str | None) -> float:
        ids = np.array([1], np.int32)
        task = first[3]
        return reward(RewardInput(task.task_id, task.environment, task.metadata, 0, ids, ids, "stop", text))

    answer = str(first[3].metadata["answer"])
    assert [rewarded(f"It is {answer}."), rewarded(answer), rewarded("0"), rewarded(None)] == [1, 1, 0, 0]
