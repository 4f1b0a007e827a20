"""Facts of a group, in the order in which requests and records have them."""

RECORD = (
    *("id", "task", "sequence", "payload", "head", "tail", "epoch"),
    *("samples", "tokens", "loss_tokens", "bytes", "spans"),
    *("environment", "priority", "mean", "responses"),
)
"""Fields of a group's record (store/lua/lib/groups/record.lua), in order."""

PUSHED = (
    *("task_id", "generation", "lease_id", "payload", "head_epoch", "head", "tail_epoch", "tail"),
    *("samples", "tokens", "loss_tokens", "bytes", "spans", "environment", "mean"),
    *("equal_rewards", "mean_reward", "min_response_tokens", "max_response_tokens"),
    *("response_lengths", "rewards", "response_tokens", "reward", "turns", "truncated_samples"),
    *("length_buckets", "version_tokens", "first_revision"),
)
"""Fields of a pushed group (store/lua/groups/push.lua), in order."""

AMOUNT = ("groups", "samples", "tokens", "bytes")
"""Sizes of groups in the ledgers and in sums, in order."""

GATHERED = ("portions", *AMOUNT)
"""Fields of a run's state on groups that are gathered for a round, in order."""
