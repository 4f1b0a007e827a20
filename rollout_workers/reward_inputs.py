"""Inputs of reward functions, and their form between processes: JSON and arrays, so that nothing is unpickled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollout_workers.generation.samples import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class RewardTurn:
    """Turn of a sample that a rollout function made."""

    role: str
    """Role of the writer: "assistant" where the model wrote."""
    ids: TokenIds
    """Token ids of the turn, int32 [t]."""
    text: str | None
    """Text of the turn, under the same condition as the sample's."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardInput:
    """Finished sample, as a reward function is given it."""

    task_id: str
    environment: str
    metadata: Mapping[str, Any]
    """The task's metadata_json, parsed; empty when it is empty. The samples of a group share it: do not change it."""
    sample_index: int
    prompt_ids: TokenIds
    """Token ids of the prompt, int32 [p]."""
    response_ids: TokenIds
    """Token ids of the response, int32 [r], a stop token and the turns of an environment included."""
    finish_reason: Literal["stop", "length"]
    text: str | None
    """The response decoded without special tokens; None unless the worker was given a tokenizer, or the task came as
    messages."""
    turns: tuple[RewardTurn, ...] = ()
    """Turns of the sample; empty unless a rollout function made it."""


def to_message(sample: RewardInput) -> tuple[bytes, bytes]:
    """A JSON object, and the token ids behind each other: prompt, response, turns. Raises TypeError, ValueError."""
    arrays = [sample.prompt_ids, sample.response_ids, *(turn.ids for turn in sample.turns)]
    head = {
        "task_id": sample.task_id,
        "environment": sample.environment,
        "metadata": sample.metadata,
        "sample_index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "turns": [[turn.role, turn.text] for turn in sample.turns],
        "lengths": [len(array) for array in arrays],
    }
    return json.dumps(head).encode(), b"".join(np.asarray(array, "<i4").tobytes() for array in arrays)


def from_message(head: bytes, ids: bytes) -> RewardInput:
    """The inverse of `to_message`."""
    values: dict[str, Any] = json.loads(head)
    ends = np.cumsum(values.pop("lengths"))[:-1]
    prompt, response, *turns = np.split(np.frombuffer(ids, "<i4"), ends)
    said = values.pop("turns")
    return RewardInput(
        **values,
        prompt_ids=prompt,
        response_ids=response,
        turns=tuple(RewardTurn(role, part, text) for (role, text), part in zip(said, turns, strict=True)),
    )
