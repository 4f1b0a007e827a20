"""Engine requests from a task's sampling parameters."""

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.engine.types import SampleRequest
from rollout_workers.samples import TokenIds


def request_of(
    sampling: tasks_pb2.SamplingParams,
    sample_index: int,
    input_ids: TokenIds,
    max_new_tokens: int,
    *,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> SampleRequest:
    """A request to go on from `input_ids`, int32 [n]; `stop` and `stop_token_ids` on top of the task's."""
    return SampleRequest(
        sample_index=sample_index,
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        temperature=_given(sampling.HasField("temperature"), sampling.temperature, 1.0),
        top_p=_given(sampling.HasField("top_p"), sampling.top_p, 1.0),
        top_k=sampling.top_k if sampling.HasField("top_k") else 0,
        stop_token_ids=(*sampling.stop_token_ids, *stop_token_ids),
        stop=(*sampling.stop, *stop),
    )


def _given(present: bool, value: float, default: float) -> float:  # noqa: FBT001 - a field's presence
    # float32 on the wire: 0.7 arrives as 0.69999999, which is 0.7 to 7 digits.
    return float(f"{value:.7g}") if present else default
