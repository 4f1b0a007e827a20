"""slime trained from the buffer, with slime's own classes; documented in `trainer_client.integrations.miles`.

--rollout-function-path trainer_client.integrations.slime.generate_rollout_fully_async
"""

from trainer_client.integrations.miles.contract import SLIME, Args, DataSource
from trainer_client.integrations.miles.publishing import checkpoint_saved, publish_weights
from trainer_client.integrations.miles.rollout import WeightsNotPublished, generate, stop_global_worker

__all__ = [
    "WeightsNotPublished",
    "checkpoint_saved",
    "generate_rollout_fully_async",
    "publish_weights",
    "stop_global_worker",
]


def generate_rollout_fully_async(
    args: Args,
    rollout_id: int,
    data_buffer: DataSource,
    evaluation: bool = False,  # noqa: FBT001, FBT002 - as slime calls it
) -> object:
    """Return one step of `rollout_batch_size` groups, or the evaluation, in slime's types; lists for an older slime."""
    return generate(SLIME, args, rollout_id, data_buffer, evaluation=evaluation)
