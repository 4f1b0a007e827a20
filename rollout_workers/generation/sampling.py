"""Engine requests from a task's sampling parameters."""

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.types import SampleRequest
from rollout_workers.generation.sample import TokenIds


def request_of(
    task: tasks_pb2.Task,
    sample_index: int,
    input_ids: TokenIds,
    max_new_tokens: int,
    *,
    generated: int,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    min_new_tokens: int = 0,
) -> SampleRequest:
    """A request to go on from `input_ids`, int32 [n], where `generated` tokens of the sample are the model's already.

    `stop`, `stop_token_ids` and `min_new_tokens`, of this request, are on top of the task's.
    """
    sampling = task.sampling
    return SampleRequest(
        sample_index=sample_index,
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        temperature=_given(sampling.HasField("temperature"), sampling.temperature, 1.0),
        top_p=_given(sampling.HasField("top_p"), sampling.top_p, 1.0),
        top_k=sampling.top_k if sampling.HasField("top_k") else 0,
        min_p=_given(sampling.HasField("min_p"), sampling.min_p, 0.0),
        repetition_penalty=_given(sampling.HasField("repetition_penalty"), sampling.repetition_penalty, 1.0),
        # Where the context leaves less, that is all there can be.
        min_new_tokens=min(max(sampling.min_new_tokens - generated, min_new_tokens, 0), max_new_tokens),
        # The engine's randomness goes by the seed and a token's position: a partial rollout draws what would have come.
        seed=sampling.seed + sample_index if sampling.HasField("seed") else None,
        stop_token_ids=(*sampling.stop_token_ids, *stop_token_ids),
        stop=(*sampling.stop, *stop),
        columns=tuple(task.columns),
    )


def _given(present: bool, value: float, default: float) -> float:  # noqa: FBT001 - a field's presence
    # float32 on the wire: 0.7 arrives as 0.69999999, which is 0.7 to 7 digits.
    return float(f"{value:.7g}") if present else default
