"""A reward function that asks a second engine, the teacher, what it thinks of each token of the student's response.

`--reward examples.distill.teacher:reward`; TEACHER_URL is the base URL of the teacher's SGLang server. Beside the
reward it returns the column `teacher_logprobs`: float32 [t], log π_teacher(token | those before it).
"""

import os
from collections.abc import Sequence

import aiohttp
import numpy as np
import numpy.typing as npt

from examples.demo.reward import exact_match
from rollout_workers.rewards import RewardInput

_session: aiohttp.ClientSession | None = None


async def reward(sample: RewardInput) -> dict[str, object]:
    """The exact match, which nobody trains on, and the teacher's log-probabilities, which the student learns from."""
    return {
        "reward": exact_match(sample.response_ids.tolist(), str(sample.metadata["answer"])),
        "teacher_logprobs": await logprobs(sample.prompt_ids.tolist(), sample.response_ids.tolist()),
    }


async def logprobs(prompt: Sequence[int], response: Sequence[int]) -> npt.NDArray[np.float32]:
    """Log-probabilities of the response's tokens under the teacher, at temperature 1: float32 [t]."""
    global _session  # noqa: PLW0603 - one connection pool for the worker's event loop
    if _session is None:
        _session = aiohttp.ClientSession(os.environ["TEACHER_URL"], raise_for_status=True)
    asked = {
        "input_ids": [*prompt, *response],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with _session.post("/generate", json=asked) as answer:
        entries = (await answer.json())["meta_info"]["input_token_logprobs"]
    # [log-probability, token id, text] of every input; the first has none before it.
    of_response = entries[len(prompt) :]
    if [entry[1] for entry in of_response] != list(response):
        raise ValueError(f"the teacher speaks of other tokens than the {len(response)} that it was asked about")
    return np.array([entry[0] for entry in of_response], np.float32)
