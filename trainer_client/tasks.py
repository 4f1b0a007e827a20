"""Tasks as a trainer writes them: one prompt each, to be generated `group_size` times.

Invariant: what is not set is not sent. Bounds are checked by the service, which names the field; here only
what could not be put into a message at all is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import tasks_pb2 as pb
from trainer_client.field_names import NamedFields

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(NamedFields):
    """How the engine samples."""

    max_new_tokens: int
    """Most tokens to generate for one sample, 1 to 1,048,576."""
    temperature: float | None = None
    """Above 0; default 1.0. Behaviour log-probabilities are taken after temperature."""
    top_p: float | None = None
    """In (0, 1]; default 1.0."""
    top_k: int | None = None
    """At least 1; default: off."""
    stop: Sequence[str] = ()
    """Strings that end a sample, at most 16."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a sample, at most 64."""
    seed: int | None = None
    """0 to 2^53 - 1; sample i of the group draws with seed + i. Default: the engine's own randomness."""
    min_p: float | None = None
    """In [0, 1]; default 0, which is off."""
    repetition_penalty: float | None = None
    """Above 0, at most 2; default 1.0, which is off."""
    min_new_tokens: int = 0
    """No stop token before a sample has so many generated tokens, of all its turns; at most max_new_tokens."""

    def to_wire(self) -> pb.SamplingParams:
        """The message."""
        return pb.SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_new_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(NamedFields):
    """One prompt: either `prompt_token_ids` or `messages`."""

    group_size: int
    """G, samples of the group, 1 to 1,024."""
    sampling: SamplingParams
    prompt_token_ids: TokenIds = ()
    """int [T], at most 1,048,576."""
    messages: Sequence[Mapping[str, str]] = ()
    """Chat messages, each with "role" and "content"; the worker applies the engine's chat template."""
    task_id: str = ""
    """1 to 128 characters of [A-Za-z0-9._:-]; empty: the run supplies one."""
    environment: str = ""
    """Name of the environment, at most 64 characters; reward functions and ledgers go by it."""
    priority: int = 0
    """0 to 255; higher is leased first."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Whatever the reward function and the trainer need, as JSON at most 256 KiB; the service never reads it."""
    columns: Sequence[str] = ()
    """Columns that the engine is to make, which come as `sample.extras`: "sampling_mask"."""

    def to_wire(self) -> pb.Task:
        """The message."""
        ids = self.prompt_token_ids
        given: object = ids
        if isinstance(given, str):
            raise TypeError("prompt_token_ids is text; it must be token ids, or the text a message of `messages`")
        if isinstance(self.columns, str):
            raise TypeError("columns is one name; it must be a list of names")
        return pb.Task(
            task_id=self.task_id,
            prompt_token_ids=ids.tolist() if hasattr(ids, "tolist") else ids,
            messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in self.messages],
            group_size=self.group_size,
            sampling=self.sampling.to_wire(),
            environment=self.environment,
            priority=self.priority,
            metadata_json=_json(self.metadata),
            columns=self.columns,
        )


def _json(metadata: Mapping[str, object]) -> str:
    if not metadata:
        return ""
    try:
        return json.dumps(metadata, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: {error}") from error


def tasks_to_wire(tasks: Sequence[Task]) -> list[pb.Task]:
    """The messages of tasks. Raises InvalidField naming the task that cannot be a message, and why."""
    wire = []
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise InvalidField(f"tasks[{i}]", type(task).__name__, "a trainer_client.Task")
        try:
            wire.append(task.to_wire())
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidField(f"tasks[{i}]", repr(task), f"one that fits the wire's Task ({error})") from error
    return wire
