"""A batch request of verifiers as tasks of a run.

verifiers repeats a prompt once for every generation. Here neighbours whose inputs are equal in every column are one
task, and its samples come back in their places.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_SAMPLES
from trainer_client.tasks import SamplingParams, Task

_IGNORED = frozenset({"logprobs", "top_logprobs"})
"""The engine always gives log-probabilities."""
_IGNORED_BODY = frozenset(
    {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "return_tokens_as_token_ids",
        "return_token_ids",
    }
)
"""How vLLM writes text; here tokens travel."""
_NEUTRAL = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Accepted with this value, which changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One batch to generate; the fields of verifiers' BatchRequest."""

    batch_id: int
    env_inputs: Mapping[str, Sequence[Any]]
    """Columns of equal length B: "prompt" (text, or chat messages), "answer", "task", "info" and any others, which
    reach rewards as the task's metadata. A worker with `--environment verifiers:NAME` needs a column "index"."""
    processing_class: Any = None
    """The tokenizer; None: the worker applies the engine's chat template, and results hold no text."""
    mask_env_responses: bool = False
    """Mask what the environment wrote in completion_mask."""
    max_seq_len: int = -1
    """Prompt and completion are cut to so many tokens; below 1: not at all."""
    mask_truncated_completions: bool = False
    """Mask all of a completion that was cut."""
    zero_truncated_completions: bool = False
    """Reward 0 for a completion that was cut."""
    max_concurrent: int = -1
    """Not used: the workers' engines decide."""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One task of a request."""

    task: Task
    start: int
    """Its samples are rows [start, start + group_size) of the batch."""


def plan_tasks(request: BatchRequest, sampling: SamplingParams, name: str) -> list[TaskPlan]:
    """The tasks of a request, with ids `name.0`, `name.1`, …. Raises InvalidField."""
    columns = request.env_inputs
    prompts = columns.get("prompt", ())
    if not len(prompts):
        raise InvalidField("env_inputs", sorted(columns), "at least one prompt")
    for column, values in columns.items():
        if len(values) != len(prompts):
            raise InvalidField(f"env_inputs[{column}]", len(values), f"one entry a prompt, {len(prompts)}")
    plans = []
    for number, (start, end) in enumerate(_runs(columns, len(prompts))):
        metadata = {column: values[start] for column, values in columns.items() if column != "prompt"}
        environment = metadata.get("task") or ""
        task = Task(
            task_id=f"{name}.{number}",
            group_size=end - start,
            sampling=sampling,
            environment=str(environment),
            metadata=metadata,
            **_prompt(prompts[start], request.processing_class),
        )
        plans.append(TaskPlan(task, start))
    return plans


def _runs(columns: Mapping[str, Sequence[Any]], rows: int) -> Iterator[tuple[int, int]]:
    """[start, end) of neighbours that are equal in every column."""
    start = 0
    for i in range(1, rows + 1):
        same = i < rows and i - start < MAX_SAMPLES and all(v[i] == v[start] for v in columns.values())
        if not same:
            yield start, i
            start = i


def _prompt(prompt: Any, processing_class: Any) -> dict[str, Any]:  # noqa: ANN401 - text or messages; any tokenizer
    if isinstance(prompt, str):
        if processing_class is None:
            raise InvalidField("processing_class", None, "a tokenizer, as prompts are text")
        return {"prompt_token_ids": list(processing_class.encode(prompt))}
    if processing_class is None:
        return {"messages": prompt}
    ids = processing_class.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    return {"prompt_token_ids": list(ids)}


def sampling_of(sampling_args: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of an OpenAI client, as verifiers' trainer writes them.

    Raises InvalidField for what the workers cannot do, rather than sample otherwise than asked.
    """
    given = {**sampling_args, **(sampling_args.get("extra_body") or {})}
    given.pop("extra_body", None)
    limits = [given.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    max_new_tokens = next((limit for limit in limits if limit is not None), None)
    if max_new_tokens is None:
        raise InvalidField("sampling_args.max_tokens", None, "a number of tokens")
    top_k = given.pop("top_k", None)
    stop = given.pop("stop", None) or ()
    sampling = SamplingParams(
        max_new_tokens=int(max_new_tokens),
        temperature=given.pop("temperature", None),
        top_p=given.pop("top_p", None),
        # vLLM writes −1 (and 0) for off.
        top_k=top_k if top_k is not None and top_k > 0 else None,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.pop("stop_token_ids", None) or ()),
    )
    for name, value in given.items():
        if name in _IGNORED or name in _IGNORED_BODY or value is None:
            continue
        if name not in _NEUTRAL:
            raise InvalidField(f"sampling_args.{name}", value, "left out: the workers do not know it")
        if value != _NEUTRAL[name]:
            raise InvalidField(f"sampling_args.{name}", value, f"{_NEUTRAL[name]}: the workers do nothing else")
    return sampling
