"""Steps of a run by verl's config: how many groups a step has, and how many versions a training makes."""
# ruff: noqa: ANN401 - verl's config has no type that mypy sees

from typing import Any

from buffer_wire.errors import InvalidField


def step_groups(config: Any) -> int:
    """Compute the number of groups of one step: what verl's trainer fetches before it trains."""
    return int(config.actor_rollout_ref.actor.ppo_mini_batch_size * config.async_training.require_batches)


def versions(config: Any) -> int:
    """Compute the number of versions that a training makes: synchronizations of parameters, each after whole steps.

    Raises InvalidField for a `rollout.total_rollout_steps` that is not enough for one.
    """
    total, sync = config.rollout.total_rollout_steps, config.async_training.trigger_parameter_sync_step
    groups = step_groups(config) * int(sync)
    if total is None or total < groups:
        limit = f"at least {groups}, the groups of one synchronization"
        raise InvalidField("rollout.total_rollout_steps", total, limit)
    return int(total // groups)
