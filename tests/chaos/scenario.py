"""Scenarios of bouts, drawn from a seed: the kind of store, the way of payloads, the policy, TLS."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.test_concurrent_history import COMMON
from tests.faults.trainer import BATCH_GROUPS
from trainer_client import Policy

STORES = ("external", "embedded", "sentinel", "cluster", "beside")
"""A server of its own; the service's child; a primary with Sentinels; a cluster; payloads on a cluster, beside."""
REPLICATED = ("sentinel", "cluster", "beside")
UPGRADED = ("external", "embedded", "sentinel")
"""Stores whose services are the last release's at first in some bouts."""
UPGRADES = 0.3
"""Part of those bouts."""
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
SKEWS_S = (0, -3_600, 40)
LIVE_CHANGES: tuple[Mapping[str, Any], ...] = (
    *({"order": order} for order in ORDERS),
    *({"overflow_action": action} for action in ("block", "reject", "drop_oldest")),
    *({"max_queued_groups": groups} for groups in (8, 12, 20)),
    {"max_inflight_groups": 6},
    {"max_inflight_groups": None},
    {"reuse_share_milli": 500},
    {"reuse_share_milli": 250},
)
"""Changes of the second run's policy while it goes on."""
UNKNOWN_TO_RELEASE = ("submission", "wait", "reuse_share_milli")
"""Values and fields of the above that the last release does not know."""


@dataclass(frozen=True)
class Scenario:
    """One bout's world."""

    number: int
    store: str
    direct_from_bytes: int
    tls: bool
    """Mutual TLS and tokens, and a store over TLS where it is not on this host alone."""
    real: bool
    """The product's workers have real SGLang servers in place of simulated ones."""
    upgraded: bool
    """The services are the last release's at first, and of this checkout before anything else strikes."""
    skew_s: tuple[int, int]
    """Error of the wall clock of each replica of the service."""
    policy: Mapping[str, Any]
    changes: Sequence[Mapping[str, Any]]
    """Changes of the second run's policy."""

    def made_policy(self) -> Policy:
        """Policy of the bout's run."""
        return Policy(**self.policy)

    def described(self) -> dict[str, Any]:
        """Facts for the report."""
        return {name: value for name, value in asdict(self).items() if name != "changes"}


def _known(choices: Sequence[Any], *, upgraded: bool) -> list[Any]:
    """Those of the choices, values or policies, that the services of a bout know."""
    return [
        choice
        for choice in choices
        if not upgraded
        or not set(UNKNOWN_TO_RELEASE) & ({choice} if isinstance(choice, str) else {*choice, *choice.values()})
    ]


def drawn(
    seed: int, number: int, stores: tuple[str, ...] = STORES, *, real_every: int = 0, upgrades: bool = False
) -> Scenario:
    """Scenario of a bout. Every kind of store has its turn before one comes again, and so have real engines.

    `upgrades`: the last release is there to begin with.
    """
    turn = list(stores)
    random.Random(f"{seed}/stores/{number // len(stores)}").shuffle(turn)
    rng = random.Random(f"{seed}/scenario/{number}")
    store = turn[number % len(stores)]
    real = real_every > 0 and number % real_every == real_every - 1
    upgraded = upgrades and not real and store in UPGRADED
    upgraded = upgraded and random.Random(f"{seed}/upgrade/{number}").random() < UPGRADES
    policy = {
        **{name: value for name, value in COMMON.items() if name != "lease_ttl_ms"},
        "lease_ttl_ms": LEASE_TTL_MS,
        **rng.choice(OVERFLOWS),
        **rng.choice(_known(GATES, upgraded=upgraded)),
        **rng.choice(SHAPES),
        **rng.choice(ADMISSIONS),
        "order": rng.choice(_known(ORDERS, upgraded=upgraded)),
    }
    if store in REPLICATED:
        policy |= {"wait_replicas": 1, "wait_timeout_ms": 500}
    return Scenario(
        number,
        store,
        direct_from_bytes=rng.choice((BOTH_WAYS, BOTH_WAYS, RELAYED, DIRECT)),
        tls=rng.random() < 0.3 and not upgraded,
        real=real,
        upgraded=upgraded,
        # A clock that is wrong comes by the path on which another release's code lies.
        skew_s=(0, 0) if upgraded else (rng.choice(SKEWS_S), rng.choice(SKEWS_S)),
        policy=policy,
        changes=_known(LIVE_CHANGES, upgraded=upgraded),
    )
