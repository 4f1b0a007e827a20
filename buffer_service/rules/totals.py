"""Totals of a run, which only grow: their names, in the order in which the store keeps them, and their bounds."""

WINDOW_VERSIONS = 32
"""Number of intervals between publishes that are kept."""

LENGTH_BUCKETS = 23
"""Number of buckets of response lengths, in tokens of a sample.

Bucket i counts samples of more than 2**(i-1) and at most 2**i response tokens, bucket 0 those of at most 1.
"""

ACCEPTED = (
    "accepted_groups",
    "accepted_samples",
    "accepted_response_tokens",
    "accepted_longest_tokens",
    "accepted_reward_milli",
    "accepted_turns",
    "accepted_truncated_samples",
)
"""Totals over accepted groups, whatever became of them.

In order: groups; samples; response tokens; the sum of each group's longest response in tokens; the sum of the samples'
rewards in thousandths (rounded for each sample, may be negative); turns of role assistant (a sample without turns has
one); samples with finish reason LENGTH.
"""

ASSEMBLED = (
    "assembled_groups",
    "assembled_samples",
    "assembled_response_tokens",
    "assembled_longest_tokens",
    "assembled_reward_milli",
    "assembled_turns",
    "assembled_truncated_samples",
)
"""Totals over the groups of assembled steps, in the order of ACCEPTED."""

STALENESS = (
    "staleness_sum",
    "pre_queue_staleness_sum",
    "in_queue_staleness_sum",
    "token_staleness_milli_sum",
)
"""Totals of staleness over the groups of assembled steps.

In versions: train - head, tail - head, train - tail. Over their response tokens: train version minus the version that
made the token, at least 0 for a group, in thousandths.
"""

GENERATION = ("generated_groups", "generation_ms")
"""Accepted groups of the last lease of their task, and the sum of the time from that lease to the acceptance."""

ENGINE_SAMPLES = (
    "running_samples",
    "max_running_samples",
    "kv_usage_milli",
    "moved_samples",
    "surplus_samples",
    "surplus_tokens",
    "takes_buckets",
)
"""Numbers of an engine's samples and what it can take, as its worker says: fields of a report, in the store's order."""

ENGINES = ("decoded_tokens", "decode_busy_ms", "decode_request_ms")
"""Totals over all engines, as their workers report them.

In order: tokens decoded; time with at least one request in progress (summed over engines); time of each request in
progress (summed over requests).
"""

TRAINER = ("trainer_busy_ms", "trainer_wait_ms")
"""Totals that the trainer reports at its publishes: time that it worked, time that it waited for a batch."""

TOTALS = (*ACCEPTED, *ASSEMBLED, *STALENESS, *GENERATION, *ENGINES, *TRAINER)
"""Totals of a run, in the order in which the store keeps them."""

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Upper bounds of the buckets of staleness, in versions.

Bucket i counts what is above bound i - 1 and at most bound i, the last one the rest.
"""

STALENESS_COUNTED = ("total", "pre_queue", "in_queue", "token")
"""Kinds of staleness that are counted by bucket, in the order in which the store keeps them.

Groups of assembled steps count by train - head, tail - head and train - tail. Their response tokens count by train
version minus the version that made the token. Each is at least 0.
"""

MOST_BEHIND = STALENESS_BOUNDS[-1] + 1
"""Versions that a token is behind the newest of its group: more are told as this many, whose bucket is the same."""

MOST = (1 << 53) - 1
"""Totals stop here, and at its negative: the store counts in doubles, which tell whole numbers apart up to it."""

RELOAD_PHASES = ("fetch", "wait", "join", "pause", "load", "resume")
"""Phases of engines' reloads. Their counters are flat: for each phase, how often it has ended, and ms in it."""

OF_ENVIRONMENT = ("accepted_response_tokens", "assembled_groups", "assembled_response_tokens", *STALENESS)
"""Totals that are kept for each environment too, in the order in which the store keeps them."""
