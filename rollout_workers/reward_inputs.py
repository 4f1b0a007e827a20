"""Inputs of reward functions, and their form between processes: JSON and arrays, so that nothing is unpickled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rollout_workers.generation.sample import TokenIds


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
    policy: str = ""
    """Name of the policy or role that wrote the row, where the task has several."""
    rows: "tuple[RewardInput, ...]" = ()
    """Further rows of the sample, in the order in which they were begun; the rest above is its first row's."""


def to_message(sample: RewardInput) -> tuple[bytes, bytes]:
    """A JSON object, and the token ids behind each other: prompt, response, turns, those of further rows. Raises
    TypeError, ValueError.
    """
    heads, ids = zip(*(_row_to_message(row) for row in (sample, *sample.rows)), strict=True)
    return json.dumps(heads).encode(), b"".join(ids)


def _row_to_message(sample: RewardInput) -> tuple[dict[str, Any], bytes]:
    arrays = [sample.prompt_ids, sample.response_ids, *(turn.ids for turn in sample.turns)]
    head = {
        "task_id": sample.task_id,
        "environment": sample.environment,
        "metadata": sample.metadata,
        "sample_index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "policy": sample.policy,
        "turns": [[turn.role, turn.text] for turn in sample.turns],
        "lengths": [len(array) for array in arrays],
    }
    return head, b"".join(np.asarray(array, "<i4").tobytes() for array in arrays)


def from_message(head: bytes, ids: bytes) -> RewardInput:
    """The inverse of `to_message`."""
    all_values: list[dict[str, Any]] = json.loads(head)
    parts = np.split(np.frombuffer(ids, "<i4"), np.cumsum([n for each in all_values for n in each["lengths"]])[:-1])
    first, *further = (_row_of_message(values, parts) for values in all_values)
    return replace(first, rows=tuple(further))


def _row_of_message(values: dict[str, Any], parts: "list[TokenIds]") -> RewardInput:
    """The next row; its arrays are taken from the front of `parts`."""
    count = len(values.pop("lengths"))
    prompt, response, *turns = parts[:count]
    del parts[:count]
    said = values.pop("turns")
    return RewardInput(
        **values,
        prompt_ids=prompt,
        response_ids=response,
        turns=tuple(RewardTurn(role, part, text) for (role, text), part in zip(said, turns, strict=True)),
    )
