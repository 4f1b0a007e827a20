"""Tasks as a trainer writes them: one prompt each, to be generated `group_size` times.

Invariant: fields that are not set are not sent. The service checks the bounds and names the field. Only values that do
not fit into a message at all are refused here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias

from buffer_wire.errors import InvalidField
from buffer_wire.messages import message_of
from rollout_buffer.v1 import groups_pb2
from rollout_buffer.v1 import tasks_pb2 as pb
from trainer_client.field_names import NamedFields

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(NamedFields):
    """Sampling parameters of a task, for the engine."""

    max_new_tokens: int
    """Largest number of tokens to generate for one sample, 1 to 1,048,576."""
    temperature: float | None = None
    """Temperature, above 0; default 1.0. Behaviour log-probabilities are taken after temperature."""
    top_p: float | None = None
    """Nucleus probability, in (0, 1]; default 1.0."""
    top_k: int | None = None
    """Number of most likely tokens to sample from, at least 1; default: off."""
    stop: Sequence[str] = ()
    """Strings that end a sample, at most 16."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a sample, at most 64."""
    seed: int | None = None
    """Seed, 0 to 2^53 - 1; sample i of the group draws with seed + i. Default: the engine's own randomness."""
    min_p: float | None = None
    """Smallest probability relative to the most likely token's, in [0, 1]; default 0, which is off."""
    repetition_penalty: float | None = None
    """Repetition penalty, above 0, at most 2; default 1.0, which is off."""
    min_new_tokens: int = 0
    """Number of generated tokens, over all its turns, that a sample must have before a stop token; at most
    max_new_tokens."""

    def to_wire(self) -> pb.SamplingParams:
        """Convert to the wire's SamplingParams."""
        return pb.SamplingParams(**asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef(NamedFields):
    """Reference to an image of a prompt, which all samples of a group share, and any number of tasks."""

    sha256: str = ""
    """SHA-256 of the encoded image, 64 digits of lower-case hex; "" beside a `location`: the worker finds it out."""
    location: str = ""
    """URL (http or https), or path below the workers' --image-root, at most 2,048 characters; "": a blob of the run."""
    start: int = 0
    """First of its placeholder tokens in the prompt; 0 in messages."""
    tokens: int = 0
    """Number of its placeholder tokens in the prompt, as the model's processor expands them; 0 in messages."""
    data: bytes = field(default=b"", repr=False, compare=False)
    """Encoded image, at most 8 MiB, which a client writes as a blob of the run before the first task that names it."""

    @classmethod
    def of(cls, data: bytes, *, start: int = 0, tokens: int = 0) -> "ImageRef":
        """Refer to an encoded image as a blob of the run."""
        return cls(sha256=sha256(data).hexdigest(), start=start, tokens=tokens, data=data)

    def to_wire(self) -> groups_pb2.ImageRef:
        """Convert to the wire's ImageRef."""
        return message_of(groups_pb2.ImageRef, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(NamedFields):
    """Task: one prompt, given as either `prompt_token_ids` or `messages`."""

    group_size: int
    """Group size G, the number of samples, 1 to 1,024."""
    sampling: SamplingParams
    prompt_token_ids: TokenIds = ()
    """Token ids of the prompt, int [T], at most 1,048,576."""
    messages: "Sequence[Mapping[str, Any]]" = ()
    """Chat messages, each with "role" and "content"; the worker applies the engine's chat template. A content is text,
    or parts as {"type": "text", "text": "..."} and {"type": "image", "image": ImageRef(...)}."""
    images: Sequence[ImageRef] = ()
    """Images of prompt_token_ids, at most 64, in order; those of messages are in their parts."""
    task_id: str = ""
    """Id of the task, 1 to 128 characters of [A-Za-z0-9._:-]; empty: the run supplies one."""
    environment: str = ""
    """Name of the environment, at most 64 characters; it selects the reward function and the ledger."""
    priority: int = 0
    """Priority, 0 to 255; higher is leased first."""
    expected_tokens: int = 0
    """Length that the group's longest response is expected to have, in tokens; 0: unknown. With the policy's
    longest_first the longest of the tasks that are submitted together are leased first.
    """
    generate_timeout_s: float = 0.0
    """Longest time for the group's samples on an engine, in seconds, at most 86,400; 0: what the worker allows the
    environment. So do the next two."""
    reward_timeout_s: float = 0.0
    """Longest time for the group's rewards, in seconds."""
    sample_attempts: int = 0
    """Attempts of one sample under one lease, at most 100."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Metadata for the reward function and the trainer, as JSON of at most 256 KiB; the service never reads it."""
    columns: Sequence[str] = ()
    """Further columns that the engine makes and `sample.extras` holds: "sampling_mask", "top_logprobs_K", "entropy",
    "routed_experts"."""

    def to_wire(self) -> pb.Task:
        """Convert to the wire's Task. Raises TypeError for text in place of token ids or of a list of columns."""
        ids = self.prompt_token_ids
        given: object = ids
        if isinstance(given, str):
            raise TypeError("prompt_token_ids is text; it must be token ids, or the text a message of `messages`")
        if isinstance(self.columns, str):
            raise TypeError("columns is one name; it must be a list of names")
        return pb.Task(
            task_id=self.task_id,
            prompt_token_ids=ids.tolist() if hasattr(ids, "tolist") else ids,
            messages=[_message(m) for m in self.messages],
            images=[image.to_wire() for image in self.images],
            group_size=self.group_size,
            sampling=self.sampling.to_wire(),
            environment=self.environment,
            priority=self.priority,
            expected_tokens=self.expected_tokens,
            generate_timeout_ms=round(1_000 * self.generate_timeout_s),
            reward_timeout_ms=round(1_000 * self.reward_timeout_s),
            sample_attempts=self.sample_attempts,
            metadata_json=_json(self.metadata),
            columns=self.columns,
        )


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    content = message["content"]
    if isinstance(content, str):
        return pb.ChatMessage(role=message["role"], content=content)
    return pb.ChatMessage(role=message["role"], parts=[_part(part) for part in content])


def _part(part: Mapping[str, Any]) -> pb.ContentPart:
    if part["type"] == "text":
        return pb.ContentPart(text=part["text"])
    if part["type"] != "image" or not isinstance(part["image"], ImageRef):
        raise TypeError(f"a part of type {part['type']!r}; it must be text, or an image with an ImageRef")
    return pb.ContentPart(image=part["image"].to_wire())


def blobs_of(tasks: Sequence[Task]) -> dict[str, bytes]:
    """Return the images that come with tasks, by their SHA-256."""
    images = [image for task in tasks for image in task.images]
    for message in (message for task in tasks for message in task.messages if not isinstance(message["content"], str)):
        images += [part["image"] for part in message["content"] if part["type"] == "image"]
    return {image.sha256: image.data for image in images if image.data}


def _json(metadata: Mapping[str, object]) -> str:
    if not metadata:
        return ""
    try:
        return json.dumps(metadata, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: {error}") from error


def tasks_to_wire(tasks: Sequence[Task]) -> list[pb.Task]:
    """Convert tasks to the wire's messages.

    Raises InvalidField for a task that cannot be a message; it names the task and why.
    """
    wire = []
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise InvalidField(f"tasks[{i}]", type(task).__name__, "a trainer_client.Task")
        try:
            wire.append(task.to_wire())
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidField(f"tasks[{i}]", repr(task), f"one that fits the wire's Task ({error})") from error
    return wire
