"""The options that are paired: admission, overflow, gate and filter in full, everything else in a seeded sample."""

from typing import Any

from buffer_service.domain.policy import (
    EnvironmentRule,
    Order,
    OverflowAction,
    StaleAction,
    StalenessMeasure,
)
from tests.liveness.simulation import Habits

Fields = dict[str, Any]

N = 4
MIB = 1 << 20

ADMISSIONS: dict[str, Fields] = {
    "no admission": {},
    "in flight 1": {"max_inflight_groups": 1},
    "in flight N": {"max_inflight_groups": N},
    "reserve": {"reserve_queue_space": True},
    "lookahead 0": {"max_lookahead": 0},
    "lookahead 1": {"max_lookahead": 1},
    "lookahead 4": {"max_lookahead": 4},
    "in flight 1, reserve": {"max_inflight_groups": 1, "reserve_queue_space": True},
    "in flight N, lookahead 1": {"max_inflight_groups": N, "max_lookahead": 1},
    "reserve, lookahead 4": {"reserve_queue_space": True, "max_lookahead": 4},
}

OVERFLOWS: dict[str, Fields] = {action.value: {"overflow_action": action} for action in OverflowAction}

# What is added to the least η that the trainer's prefetch and publish interval allow.
LEAST, MORE = 0, 1

GATES: dict[str, Fields] = {
    "no gate": {},
    "least": {"max_staleness": LEAST},
    "least + 1": {"max_staleness": MORE},
    "recycle": {"max_staleness": LEAST, "stale_action": StaleAction.RECYCLE},
    "recycle twice": {"max_staleness": MORE, "stale_action": StaleAction.RECYCLE, "max_incarnations": 2},
    "mean": {"max_staleness": LEAST, "staleness_measure": StalenessMeasure.MEAN},
    "tail": {"max_staleness": LEAST, "staleness_measure": StalenessMeasure.TAIL, "stale_action": StaleAction.RECYCLE},
    "cancel": {"max_staleness": LEAST, "cancel_stale_leases": True},
    "wait": {"max_staleness": MORE, "stale_action": StaleAction.WAIT, "stale_wait_ms": 500},
}

FILTERS: dict[str, Fields] = {
    "no filter": {},
    "equal rewards": {"filter_equal_rewards": True},
    "lengths": {"filter_min_response_tokens": 3, "filter_max_response_tokens": 30},
    "rewards": {"filter_min_mean_reward_milli": 200, "filter_max_mean_reward_milli": 800},
}

SHAPES: dict[str, tuple[Fields, Habits]] = {
    "whole": ({}, Habits()),
    "whole, 4 ranks": ({}, Habits(world_size=4)),
    "more ranks than groups": ({"batch_groups": 2}, Habits(world_size=4)),
    "equal, 2 ranks": ({"equal_shards": True}, Habits(world_size=2)),
    "equal, 4 ranks": ({"equal_shards": True}, Habits(world_size=4)),
    "tokens": ({"batch_tokens": 100}, Habits()),
    "few tokens": ({"batch_tokens": 20}, Habits(world_size=2)),
    "tokens, equal": ({"batch_tokens": 100, "equal_shards": True}, Habits(world_size=4)),
    "micro-batches of 1": ({"micro_batch_groups": 1}, Habits()),
    "micro-batches of 2": ({"micro_batch_groups": 1}, Habits(world_size=2)),
    "micro-batches of 3": ({"micro_batch_groups": 3}, Habits()),
    "equal micro-batches": ({"micro_batch_groups": 1, "equal_shards": True}, Habits(world_size=2)),
    "micro-batches of tokens": ({"micro_batch_groups": 1, "batch_tokens": 60}, Habits()),
    "used again": ({"max_uses": 3, "reuse_share_milli": 1_000, "reuse_max_staleness": 4}, Habits(world_size=2)),
    "used again, micro-batches": (
        {"max_uses": 2, "reuse_share_milli": 500, "reuse_max_staleness": 9, "micro_batch_groups": 1},
        Habits(),
    ),
    "own sizes": ({}, Habits(own_sizes=True)),
    "own sizes, micro-batches": ({"micro_batch_groups": 1}, Habits(own_sizes=True, world_size=2)),
    "own sizes, equal": ({"equal_shards": True}, Habits(own_sizes=True, world_size=2)),
}

QUEUES: dict[str, Fields] = {
    "as small as may be": {"max_queued_groups": LEAST},
    "a little larger": {"max_queued_groups": 3},
    "many": {"max_queued_groups": 30},
    "few tokens": {"max_queued_groups": 30, "max_queued_tokens": 400},
}

PACES: dict[str, Fields] = {
    "1 per publish": {},
    "3 per publish": {"batches_per_publish": 3},
    "2 ahead": {"prefetch_batches": 2},
    "1 ahead, 2 per publish": {"prefetch_batches": 1, "batches_per_publish": 2},
}

QUOTAS: dict[str, Fields] = {
    "no quota": {},
    "groups": {"quota_groups": LEAST},
    "tokens": {"max_queued_tokens": 400, "quota_tokens": LEAST},
    "bytes": {"max_queued_bytes": MIB, "quota_bytes": LEAST},
}

MIXTURES: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "one environment": ({}, ("math",)),
    "shares": (
        {
            "environments": (
                EnvironmentRule(environment="code", share=1),
                EnvironmentRule(environment="math", share=5),
                EnvironmentRule(environment="chat", share=0, priority=9),
            )
        },
        ("math", "code", "chat"),
    ),
    "in order": (
        {"order": Order.SUBMISSION, "order_window_groups": 2, "stale_wait_ms": 500, "longest_first": True},
        ("math",),
    ),
    "in order, shares": (
        {
            "order": Order.SUBMISSION,
            "order_window_groups": N,
            "stale_wait_ms": 500,
            "environments": (
                EnvironmentRule(environment="code", share=1),
                EnvironmentRule(environment="math", share=5),
                EnvironmentRule(environment="chat", share=0),
            ),
        },
        ("math", "code", "chat"),
    ),
    "limited": (
        {
            "environments": (
                EnvironmentRule("code", 3, starts_per_minute=600, start_burst=2),
                EnvironmentRule("math", 1, starts_per_minute=6_000),
            )
        },
        ("math", "code"),
    ),
    "stages": ({"stages": ("rewards", "reference")}, ("math",)),
    "lifo": ({"order": Order.LIFO}, ("math", "code")),
    "stalest first": ({"order": Order.STALEST_FIRST}, ("math",)),
    "priority": (
        {"order": Order.PRIORITY, "environments": (EnvironmentRule(environment="code", priority=7),)},
        ("math", "code"),
    ),
}

ATTEMPTS: dict[str, Fields] = {
    "3 attempts": {"max_attempts": 3},
    "1 attempt": {"max_attempts": 1},
    "no spread": {"max_version_spread": 0},
    "few retained": {"retained_steps": 1, "max_retained_bytes": 5_000},
    "few pending": {"max_pending_tasks": 8},
    "steered": {"target_staleness_milli": 1},
}

TRAINERS: dict[str, Habits] = {
    "commits with the publish": Habits(),
    "commits first": Habits(publishing="commit first"),
    "publishes first": Habits(publishing="publish first"),
    "crashes": Habits(crashes=2),
    "commits first and crashes": Habits(publishing="commit first", crashes=2),
    "gives groups back": Habits(gives_back=True),
    "gives groups back and crashes": Habits(gives_back=True, publishing="commit first", crashes=2),
}
