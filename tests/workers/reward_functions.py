"""Reward functions for processes; what they do depends on the task's metadata."""

import os
import signal
import sys
import threading
from typing import Any

from rollout_workers.rewards import RewardInput


def obedient(sample: RewardInput) -> Any:
    """Does what metadata[sample_index] says, and else counts the response's tokens."""
    what = sample.metadata.get(str(sample.sample_index))
    if what == "hang":
        threading.Event().wait()
    elif what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "exit":
        sys.exit(3)
    elif what == "raise":
        raise ValueError("no such answer")
    elif what == "pid":
        return os.getpid()
    elif what == "text":
        return "much"
    elif what == "object":
        return object()
    return len(sample.response_ids)


def hanging(sample: RewardInput) -> float:
    """Says so in the worker's log."""
    print("the reward function hangs", flush=True)
    threading.Event().wait()
    raise AssertionError("unreachable")


def about(sample: RewardInput) -> float:
    """1.0 if the sample came over whole."""
    turns = [(turn.role, turn.ids.tolist(), turn.text) for turn in sample.turns]
    expected = ("t1", "sums", {"a": [1]}, [1, 2, 3], [0, 1], "stop", "ab", [("assistant", [0, 1], "ab")])
    given = (
        sample.task_id,
        sample.environment,
        sample.metadata,
        sample.prompt_ids.tolist(),
        sample.response_ids.tolist(),
        sample.finish_reason,
        sample.text,
        turns,
    )
    return float(given == expected)


def broken(sample: RewardInput) -> float:
    """Has no key for the judge, say."""
    raise PermissionError("the judge does not know us")


async def coroutine(sample: RewardInput) -> float:
    return 1.0
