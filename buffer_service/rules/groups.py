"""Facts of a group, in the order in which requests and records have them."""

RECORD = (
    *("id", "task", "sequence", "payload", "head", "tail", "term"),
    *("samples", "tokens", "loss_tokens", "bytes", "spans"),
    *("environment", "priority", "mean", "responses"),
    *("stage", "tries", "added"),
    "uses",
)
"""Fields of a group's record (store/lua/lib/groups/record.lua), in order.

Only groups that stages have met have the next to last three, and only those that a step uses again all four of the
last: how many steps had them before.
"""

MADE = (
    *("payload", "head_term", "head", "tail_term", "tail", "spans", "equal_rewards", "stored"),
    *("length_buckets", "version_tokens"),
)
"""Fields of a pushed group that are made for the script, out of its payload key and its facts."""

FACTS = (
    *("task_id", "incarnation", "lease_id", "environment"),
    *("samples", "tokens", "loss_tokens", "size_bytes", "mean_milli", "mean_reward_milli"),
    *("min_response_tokens", "max_response_tokens", "response_lengths", "rewards"),
    *("response_tokens", "reward_milli", "turns", "truncated_samples", "first_revision"),
    *("failed_samples", "trajectories", "trajectory_rewards"),
)
"""Fields of a pushed group that are facts as they are, under their names in domain.ops.GroupFacts."""

PUSHED = (*MADE, *FACTS)
"""Fields of a pushed group (store/lua/groups/push.lua), in order."""

AMOUNT = ("groups", "samples", "tokens", "bytes")
"""Sizes of groups in the ledgers and in sums, in order."""

GATHERED = ("portions", *AMOUNT)
"""Fields of a run's state on groups that are gathered for a micro-batch, in order."""
