"""Groups as the batch result of verifiers: one row a sample, in the order of the request's prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_client.batch import Group, Sample
from trainer_client.integrations.verifiers_requests import BatchRequest, TaskPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedOutputs:
    """B rows, each a list over its own tokens; the fields of verifiers' ProcessedOutputs."""

    prompt_ids: list[list[int]]
    prompt_mask: list[list[int]]
    """0 throughout."""
    completion_ids: list[list[int]]
    completion_mask: list[list[int]]
    """1 where the token counts in the loss."""
    completion_logprobs: list[list[float]]
    """Of the policy that generated the token; 0.0 for tokens of the environment."""
    rewards: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What became of a request; the fields of verifiers' BatchResult, and `versions`. Can be pickled."""

    batch_id: int
    processed_results: ProcessedOutputs
    generation_time: float = 0.0
    """Seconds from the submit to the last group."""
    all_reward_dict: dict[str, list[float]] = field(default_factory=dict)
    """"reward", and every column of one number a sample that the workers sent along."""
    completions: list[Any] = field(default_factory=list)
    """Text, or chat messages where the prompt is chat; empty without a processing_class."""
    prompts: list[Any] = field(default_factory=list)
    """As they were requested."""
    versions: list[list[int]] = field(default_factory=list)
    """The weight version behind each token of a completion."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample, cut to max_seq_len."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    versions: list[int]
    reward: float


def result_of(
    request: BatchRequest, plans: Sequence[TaskPlan], groups: Mapping[str, Group], generation_time: float
) -> BatchResult:
    """The result of a request all of whose tasks have their group in `groups`, by task id."""
    samples = [sample for plan in plans for sample in groups[plan.task.task_id].samples]
    rows = [_row(sample, request) for sample in samples]
    prompts = list(request.env_inputs["prompt"])
    processed = ProcessedOutputs(
        prompt_ids=[row.prompt_ids for row in rows],
        prompt_mask=[[0] * len(row.prompt_ids) for row in rows],
        completion_ids=[row.completion_ids for row in rows],
        completion_mask=[row.completion_mask for row in rows],
        completion_logprobs=[row.completion_logprobs for row in rows],
        rewards=[row.reward for row in rows],
    )
    completions = []
    if request.processing_class is not None:
        pairs = zip(prompts, samples, strict=True)
        completions = [_completion(prompt, sample, request.processing_class) for prompt, sample in pairs]
    return BatchResult(
        batch_id=request.batch_id,
        processed_results=processed,
        generation_time=generation_time,
        all_reward_dict={"reward": [sample.reward for sample in samples], **_numbers(samples)},
        completions=completions,
        prompts=prompts,
        versions=[row.versions for row in rows],
    )


def _row(sample: Sample, request: BatchRequest) -> _Row:
    """Cut from the end, as `process_env_results_vllm` does; what is cut can be masked or given reward 0."""
    limit = request.max_seq_len if request.max_seq_len > 0 else sample.tokens
    truncated = sample.tokens > limit
    prompt = slice(0, min(sample.prompt_len, limit))
    completion = slice(sample.prompt_len, max(sample.prompt_len, limit))
    mask = sample.loss_mask[completion].tolist()
    if truncated and request.mask_truncated_completions:
        mask = [0] * len(mask)
    elif not request.mask_env_responses:
        mask = [1] * len(mask)
    return _Row(
        prompt_ids=sample.token_ids[prompt].tolist(),
        completion_ids=sample.token_ids[completion].tolist(),
        completion_mask=mask,
        completion_logprobs=sample.logprobs[completion].tolist(),
        versions=sample.versions[completion].tolist(),
        reward=0.0 if truncated and request.zero_truncated_completions else sample.reward,
    )


def _completion(prompt: Any, sample: Sample, processing_class: Any) -> Any:  # noqa: ANN401 - text or messages
    def text(start: int, end: int) -> str:
        return str(processing_class.decode(sample.token_ids[start:end].tolist(), skip_special_tokens=True))

    if isinstance(prompt, str):
        return text(sample.prompt_len, sample.tokens)
    said = [turn for turn in sample.turns if turn.start >= sample.prompt_len]
    if not said:
        return [{"role": "assistant", "content": text(sample.prompt_len, sample.tokens)}]
    return [{"role": turn.role, "content": text(turn.start, turn.end)} for turn in said]


def _numbers(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Extra columns that are one number a sample, of every sample."""
    if not samples:
        return {}
    names = [name for name, array in samples[0].extras.items() if array.ndim == 0]
    return {
        name: [float(sample.extras[name]) for sample in samples]
        for name in names
        if all(name in sample.extras for sample in samples)
    }
