"""Miles (and, by `trainer_client.integrations.slime`, slime) trained from the buffer.

    --rollout-function-path trainer_client.integrations.miles.generate_rollout_fully_async
    --custom-async-data-buffer-path trainer_client.integrations.miles.BufferServiceDataBuffer

The first has the buffer's workers generate; the second keeps the groups that Miles' own engines generate in the buffer.
Both are described in docs/integrations/miles.md.
"""

from trainer_client.integrations.miles.contract import MILES, Args, DataSource
from trainer_client.integrations.miles.data_buffer import BufferServiceDataBuffer
from trainer_client.integrations.miles.evaluation import EvaluationFailed
from trainer_client.integrations.miles.publishing import checkpoint_saved, post_save_hook, publish_weights
from trainer_client.integrations.miles.rollout import WeightsNotPublished, generate, stop_global_worker

__all__ = [
    "BufferServiceDataBuffer",
    "EvaluationFailed",
    "WeightsNotPublished",
    "checkpoint_saved",
    "generate_rollout_fully_async",
    "post_save_hook",
    "publish_weights",
    "stop_global_worker",
]


def generate_rollout_fully_async(
    args: Args,
    rollout_id: int,
    data_source: DataSource,
    evaluation: bool = False,  # noqa: FBT001, FBT002 - as Miles calls it
) -> object:
    """Return one step of `rollout_batch_size` groups as RolloutFnTrainOutput, or RolloutFnEvalOutput of the eval
    datasets.
    """
    return generate(MILES, args, rollout_id, data_source, evaluation=evaluation)
