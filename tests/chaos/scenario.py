"""Scenarios of bouts, drawn from a seed: the kind of store, the way of payloads, the policy, TLS."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.test_concurrent_history import COMMON
from tests.faults.trainer import BATCH_GROUPS
from trainer_client import Policy

STORES = ("external", "embedded", "sentinel", "cluster", "beside")
"""A server of its own; the service's child; a primary with Sentinels; a cluster; payloads on a cluster, beside."""
REPLICATED = ("sentinel", "cluster", "beside")
LEASE_TTL_MS = 3_000
"""Above what a jump of a clock may take from a lease."""
BOTH_WAYS, RELAYED, DIRECT = 1_000, 100 << 20, 1
"""Size from which on groups go directly, in bytes."""

OVERFLOWS: tuple[Mapping[str, Any], ...] = (
    {"overflow_action": "drop_oldest", "max_queued_groups": 9},
    {"overflow_action": "block", "max_queued_groups": 7},
    {"overflow_action": "reject", "max_queued_groups": 7},
)
GATES: tuple[Mapping[str, Any], ...] = (
    {"max_staleness": 2, "stale_action": "drop"},
    {"max_staleness": 2, "stale_action": "recycle", "cancel_stale_leases": True},
    {"max_staleness": 3, "stale_action": "wait", "max_lookahead": 2, "max_queued_groups": 6 * BATCH_GROUPS},
)
SHAPES: tuple[Mapping[str, Any], ...] = (
    {},
    {"micro_batch_groups": 1, "equal_shards": True},
    {"environments": {"sums": 3, "words": 1}},
)
ADMISSIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"max_inflight_groups": 10, "max_lookahead": 2, "quota_groups": 3 * BATCH_GROUPS},
)
ORDERS = ("fifo", "lifo", "stalest_first", "priority", "submission")


@dataclass(frozen=True)
class Scenario:
    """One bout's world."""

    number: int
    store: str
    direct_from_bytes: int
    tls: bool
    policy: Mapping[str, Any]

    def made_policy(self) -> Policy:
        """Policy of the bout's run."""
        return Policy(**self.policy)

    def described(self) -> dict[str, Any]:
        """Facts for the report."""
        return asdict(self)


def drawn(seed: int, number: int, stores: tuple[str, ...] = STORES) -> Scenario:
    """Scenario of a bout. Every kind of store has its turn before one comes again."""
    turn = list(stores)
    random.Random(f"{seed}/stores/{number // len(stores)}").shuffle(turn)
    rng = random.Random(f"{seed}/scenario/{number}")
    store = turn[number % len(stores)]
    policy = {
        **{name: value for name, value in COMMON.items() if name != "lease_ttl_ms"},
        "lease_ttl_ms": LEASE_TTL_MS,
        **rng.choice(OVERFLOWS),
        **rng.choice(GATES),
        **rng.choice(SHAPES),
        **rng.choice(ADMISSIONS),
        "order": rng.choice(ORDERS),
    }
    if store in REPLICATED:
        policy |= {"wait_replicas": 1, "wait_timeout_ms": 500}
    return Scenario(number, store, rng.choice((BOTH_WAYS, BOTH_WAYS, RELAYED, DIRECT)), rng.random() < 0.3, policy)
