"""Tasks from a TRL data set, and pulled samples in the form that a rollout function of TRL returns.

Invariants: the stream of tasks depends on the data set, the seed and the options alone, and the feeder's cursor is a
place in it. Every task carries the number of its row, so that the row is found again beside the group. Needs neither
torch nor trl.

Followed: trl 1.16.0, `GRPOTrainer` (rollout_func, RepeatSampler) and `GRPOConfig`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from buffer_wire.errors import InvalidField
from trainer_client.batch import Group, Sample
from trainer_client.tasks import SamplingParams, Task

ROW = "trl_row"
"""Metadata key of a task: the number of its row in the data set."""
REWARD = "buffer_reward"
"""Extra field of a rollout: the reward that the worker gave."""

_GENERATION_KWARGS = frozenset({"stop", "stop_token_ids", "seed", "min_new_tokens", "min_tokens"})
"""Arguments that TRL passes on to its generator, by the names of transformers and of vLLM."""

Prompts: TypeAlias = Literal["token_ids", "messages"]
Encode: TypeAlias = Callable[[Any], Sequence[int]]


class SamplingConfig(Protocol):
    """Part of `GRPOConfig` and of `AsyncGRPOConfig` that is used here; the former has `generation_kwargs` too."""

    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float


class Rows(Protocol):
    """Part of `datasets.Dataset` that is used here."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskForm:
    """Form of the tasks that rows become."""

    prompts: Prompts = "token_ids"
    """Form of the prompts, which decides who applies the chat template: the trainer ("token_ids"), or the worker
    ("messages")."""
    metadata_columns: Sequence[str] | None = None
    """Columns that go to the worker's reward function as metadata; None: all but the prompt."""
    environment_column: str | None = None
    """Column that names the task's environment; None: none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(TaskForm):
    """Options of the conversion from rows to tasks."""

    group_size: int
    """Group size G, the config's num_generations."""
    sampling: SamplingParams
    shuffle: bool
    """True gives every pass over the rows an order of its own."""
    seed: int


class RowTasks:
    """Tasks from rows, pass after pass, without an end; the trainer decides when training ends."""

    def __init__(self, rows: Rows, encode: Encode, options: TaskOptions) -> None:
        if len(rows) == 0:
            raise InvalidField("train_dataset", "no rows", "at least one")
        self._rows = rows
        self._encode = encode
        self._options = options
        self._drawn = 0

    def state(self) -> bytes:
        """Return the place in the stream, for the feeder."""
        return str(self._drawn).encode()

    def load_state(self, state: bytes) -> None:
        """Go on at the place where `state` was taken."""
        self._drawn = int(state)

    def __iter__(self) -> Iterator[Task]:
        while True:
            passes, at = divmod(self._drawn, len(self._rows))
            order = np.arange(len(self._rows))
            if self._options.shuffle:
                order = np.random.default_rng([self._options.seed, passes]).permutation(order)
            for index in order[at:].tolist():
                self._drawn += 1
                yield self._task(index)

    def _task(self, index: int) -> Task:
        row, options = self._rows[index], self._options
        prompt = row["prompt"]
        if options.prompts == "messages" and isinstance(prompt, str):
            raise InvalidField("prompts", "messages", f"'token_ids': the prompt of row {index} is text")
        names = options.metadata_columns
        columns = [name for name in row if name != "prompt"] if names is None else names
        return Task(
            prompt_token_ids=self._encode(prompt) if options.prompts == "token_ids" else (),
            messages=prompt if options.prompts == "messages" else (),
            group_size=options.group_size,
            sampling=options.sampling,
            environment=str(row[options.environment_column]) if options.environment_column else "",
            metadata={**{name: row[name] for name in columns}, ROW: index},
        )


def encoder(tokenizer: Any, **template: object) -> Encode:  # noqa: ANN401 - a tokenizer of transformers
    """Make the function that makes token ids of a prompt, text or messages; `template` goes to the chat template.

    It has a tokenizer of its own, for the feeder's thread calls it: two threads cannot share a fast one.
    """
    own = copy.deepcopy(tokenizer)

    def encode(prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return list(own(text=[prompt])["input_ids"][0])
        encoded = own.apply_chat_template(
            conversation=[prompt], add_generation_prompt=True, tokenize=True, return_dict=True, **template
        )
        return list(encoded["input_ids"][0])

    return encode


def sampling_of(config: SamplingConfig) -> SamplingParams:
    """Convert a trainer's config to the workers' sampling parameters.

    Raises InvalidField for options that engines do not get.
    """
    extra: dict[str, Any] = dict(getattr(config, "generation_kwargs", None) or {})
    if not extra.keys() <= _GENERATION_KWARGS:
        limit = f"only {sorted(_GENERATION_KWARGS)}"
        raise InvalidField("generation_kwargs", sorted(extra.keys() - _GENERATION_KWARGS), limit)
    stop = extra.get("stop", ())
    return SamplingParams(
        max_new_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k if config.top_k > 0 else None,
        min_p=config.min_p,
        repetition_penalty=None if config.repetition_penalty == 1 else config.repetition_penalty,
        min_new_tokens=extra.get("min_new_tokens", extra.get("min_tokens", 0)),
        seed=extra.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(extra.get("stop_token_ids", ())),
    )


def row_of(group: Group, rows: Rows) -> dict[str, Any]:
    """Find the row of a group's task. Raises InvalidField for one that `RowTasks` did not make, and for images."""
    group.refuse_images("TRL would train without them")
    index = group.metadata.get(ROW)
    if not isinstance(index, int) or not 0 <= index < len(rows):
        limit = f"a row of this train_dataset, 0 to {len(rows) - 1}: is this run fed with another one?"
        raise InvalidField(f"metadata.{ROW} of task {group.task_id}", index, limit)
    return dict(rows[index])


def rollouts_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Convert samples to the form that a rollout function of TRL returns, one entry each.

    "prompt_ids", "completion_ids": lists of int; "logprobs": float of the policy that generated the token; "env_mask":
    0 where a token is not the model's, which TRL treats as a tool's; "buffer_reward": float.
    """
    return {
        "prompt_ids": [sample.token_ids[: sample.prompt_len].tolist() for sample in samples],
        "completion_ids": [sample.token_ids[sample.prompt_len :].tolist() for sample in samples],
        "logprobs": [sample.logprobs[sample.prompt_len :].tolist() for sample in samples],
        "env_mask": [sample.loss_mask[sample.prompt_len :].tolist() for sample in samples],
        REWARD: [sample.reward for sample in samples],
    }


def worker_reward(*, buffer_reward: Sequence[float], **_: object) -> list[float]:
    """Return the workers' rewards, as a reward function of TRL; the only one where a trainer is given none."""
    return list(buffer_reward)
