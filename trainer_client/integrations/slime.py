"""slime trained from the buffer, with slime's own classes; documented in `trainer_client.integrations.miles`.

--rollout-function-path trainer_client.integrations.slime.generate_rollout_fully_async
--custom-update-weight-post-write-path trainer_client.integrations.slime.post_write_hook

Followed: THUDM/slime at 624b824.
"""

import re
from pathlib import Path

from buffer_wire.errors import InvalidField
from trainer_client.integrations.miles.contract import SLIME, Args, DataSource
from trainer_client.integrations.miles.publishing import checkpoint_saved, publish_weights
from trainer_client.integrations.miles.rollout import WeightsNotPublished, generate, stop_global_worker
from trainer_client.integrations.miles.settings import Settings

__all__ = [
    "WeightsNotPublished",
    "checkpoint_saved",
    "generate_rollout_fully_async",
    "post_write_hook",
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


def post_write_hook(args: Args, version_dir: str, rollout_engines: object) -> None:  # noqa: ARG001 - slime's signature
    """Publish, by `publish_weights`, what an update of weights has written on the disk; slime calls it on every rank.

    Updates are numbered from 1 in each program. The first comes before the training, with weights that the engines
    have, and publishes nothing. Raises InvalidField unless slime writes whole directories and keeps them.
    """
    if args.update_weight_mode != "full" or not args.update_weight_disk_keep_files:
        limit = "full, with --update-weight-disk-keep-files: engines load what is published later"
        raise InvalidField("--update-weight-mode", args.update_weight_mode, limit)
    update = re.fullmatch(r"weight_v(\d+)", Path(version_dir).name)
    if update is None:
        raise InvalidField("version_dir", version_dir, "…/weight_vN, N the number of the update")
    import torch.distributed as dist

    is_first = not dist.is_initialized() or dist.get_rank() == 0
    trained = int(update[1]) - 1
    if trained == 0 or not is_first:
        return
    interval, start = Settings.of(args).interval, args.start_rollout_id or 0
    # Updates come after rollouts whose number from 1 is a multiple of the interval.
    publish_weights(args, (start // interval + trained) * interval - 1, version_dir)
