"""Policies under which every rule can be met within a few operations.

A policy is a base and some features; a mood's own features are always there, the others now and then.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from buffer_service.domain.policy import (
    UNSET,
    EnvironmentRule,
    Order,
    OverflowAction,
    RunPolicy,
    StaleAction,
    StalenessMeasure,
    TargetMeasure,
)
from buffer_wire.errors import InvalidRequest
from tests.model.drawing import Draw
from tests.model.universe import ENVIRONMENTS, MIB

Values = dict[str, Any]

ORDERS = (*Order, Order.LIFO, Order.PRIORITY)
MEASURES = (*StalenessMeasure, StalenessMeasure.MEAN)
OVERFLOWS = tuple(OverflowAction)
STALES = tuple(StaleAction)


def policy(draw: Draw, features: Collection[str] = ()) -> RunPolicy:
    """A new policy with these features and perhaps others."""
    values = _base(draw)
    for name, feature in FEATURES.items():
        if name in features or draw.rarely(6):
            values |= feature(draw, values)
    return RunPolicy(**_possible(values))


def changed(draw: Draw, present: RunPolicy, features: Collection[str]) -> RunPolicy:
    """The present policy with one feature drawn anew, as an operator changes it."""
    values = {field.name: getattr(present, field.name) for field in dataclasses.fields(present)}
    values |= FEATURES[draw.pick(tuple(features) or tuple(FEATURES))](draw, values)
    try:
        return RunPolicy(**_possible(values))
    except InvalidRequest:  # what is left of another feature contradicts it
        return present


def _base(draw: Draw) -> Values:
    groups = draw.integer(1, 3)
    prefetch, per_publish = draw.pick(((0, 1), (0, 1), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2)))
    least = (prefetch + per_publish - 1) // per_publish
    return {
        "batch_groups": groups,
        "max_queued_groups": groups + draw.integer(0, 3),
        "max_queued_tokens": draw.pick((0, 0, 20, 40)),
        "max_queued_bytes": draw.pick((MIB, 8 * MIB)),
        "overflow_action": draw.pick(OVERFLOWS),
        "max_staleness": draw.pick((UNSET, least, least, least + 1, least + 2)),
        "stale_action": draw.pick(STALES),
        "max_inflight_groups": draw.pick((0, 0, 0, 1, 3)),
        "reserve_queue_space": draw.rarely(4),
        "max_lookahead": draw.pick((UNSET, UNSET, least, least + 1, least + 2)),
        "lease_ttl_ms": draw.pick((1_000, 2_500, 20_000)),
        "max_attempts": draw.integer(1, 3),
        "retry_backoff_ms": draw.pick((0, 100)),
        "failure_budget": draw.pick((UNSET, UNSET, UNSET, 0, 1)),
        "max_pending_tasks": draw.pick((10_000, 10_000, 4)),
        "prefetch_batches": prefetch,
        "batches_per_publish": per_publish,
        "retained_steps": draw.pick((1, 3, 64)),
    }


def _ordered(draw: Draw, values: Values) -> Values:
    return {"order": draw.pick(ORDERS), "max_queued_groups": values["max_queued_groups"] + 2}


def _shared(draw: Draw, values: Values) -> Values:
    """Shares and priorities of some environments, or priorities alone, and room for them to matter."""
    shares = (UNSET, 0, 1, 2, 3, 7) if draw.integer(0, 2) else (UNSET,)
    rules = [
        EnvironmentRule(
            environment=environment,
            share=draw.pick(shares),
            priority=draw.pick((UNSET, UNSET, 0, 2, 5)),
            **_limit(draw),
        )
        for environment in ENVIRONMENTS
        if draw.integer(0, 2)
    ]
    return {"environments": tuple(rules), "max_queued_groups": max(6, values["max_queued_groups"])}


def _limit(draw: Draw) -> Values:
    """Mostly none; else so few starts that time has to pass."""
    if not draw.rarely(4):
        return {}
    return {"starts_per_minute": draw.pick((7, 600, 60_000)), "start_burst": draw.pick((UNSET, 1, 2, 5))}


def _measured(draw: Draw, values: Values) -> Values:
    order = Order.STALEST_FIRST if draw.rarely(2) else values.get("order", Order.FIFO)
    return {"staleness_measure": draw.pick(MEASURES), "cancel_stale_leases": False, "order": order}


def _cancelling(draw: Draw, values: Values) -> Values:
    least = _least_staleness(values)
    return {
        "max_staleness": least + draw.integer(0, 1),
        "staleness_measure": StalenessMeasure.HEAD,
        "cancel_stale_leases": True,
    }


def _narrow(draw: Draw, values: Values) -> Values:
    return {
        "max_version_spread": draw.integer(0, 2),
        "max_staleness": draw.pick((UNSET, _least_staleness(values) + 3)),
        "cancel_stale_leases": False,
    }


def _recycling(draw: Draw, values: Values) -> Values:
    least = _least_staleness(values)
    return {
        "stale_action": StaleAction.RECYCLE,
        "max_incarnations": draw.integer(0, 2),
        "max_staleness": least + draw.integer(0, 1),
    }


def _filtering(draw: Draw, values: Values) -> Values:
    filters: Values = {"filter_equal_rewards": draw.rarely(2)}
    if draw.rarely(2):
        filters["filter_min_response_tokens"] = draw.pick((0, 3))
        filters["filter_max_response_tokens"] = draw.pick((0, 12, 30))
    if draw.rarely(2):
        filters["filter_min_mean_reward_milli"] = draw.pick((-(10**12), -250, 0))
        filters["filter_max_mean_reward_milli"] = draw.pick((10**12, 999, 500))
    return filters


def _by_tokens(draw: Draw, values: Values) -> Values:
    return {
        "batch_tokens": draw.pick((6, 10, 13, 20)),
        "batch_groups": draw.integer(2, 5),
        "max_queued_tokens": draw.pick((0, 40)),
    }


def _equal(draw: Draw, values: Values) -> Values:
    return {"equal_shards": True, "batch_groups": draw.pick((1, 2, 2, 4, 6))}


def _streamed(draw: Draw, values: Values) -> Values:
    micro = draw.integer(1, 2)
    return {
        "micro_batch_groups": micro,
        "batch_groups": micro * draw.integer(1, 4) + draw.integer(0, 1),
        "max_queued_groups": micro * draw.pick((1, 2, 3, 3)) + draw.integer(0, 1),
    }


def _limited(draw: Draw, values: Values) -> Values:
    """Quotas, mostly as tight as they may be: `_possible` raises them to that."""
    which = draw.integer(1, 7)
    return {
        "quota_groups": (which & 1) * draw.pick((1, 1, 6)),
        "quota_tokens": (which >> 1 & 1) * draw.pick((1, 1, 60)),
        "quota_bytes": (which >> 2) * draw.pick((1, 1, 4)) * MIB,
        "max_queued_groups": values["max_queued_groups"] + 2,
        "overflow_action": draw.pick((OverflowAction.DROP_OLDEST, OverflowAction.DROP_OLDEST, OverflowAction.REJECT)),
    }


def _blocking(draw: Draw, values: Values) -> Values:
    groups = values["batch_groups"] if draw.rarely(2) else values["max_queued_groups"]
    return {"overflow_action": OverflowAction.BLOCK, "max_queued_groups": groups, "lease_ttl_ms": 20_000}


def _forgetting(draw: Draw, values: Values) -> Values:
    return {"max_retained_bytes": draw.pick((1, 100, 300, 400_000, MIB)), "retained_steps": 64}


def _foresighted(draw: Draw, values: Values) -> Values:
    """Admission by the lookahead, mostly with a gate at it, or one version to either side."""
    least = _least_staleness(values)
    ahead = least + draw.integer(0, 2)
    gate = draw.pick((UNSET, ahead, ahead, ahead + 1, max(least, ahead - 1)))
    return {"max_lookahead": ahead, "max_staleness": gate, "max_inflight_groups": 0, "cancel_stale_leases": False}


def _waiting(draw: Draw, values: Values) -> Values:
    """Batches wait for groups in flight, mostly long enough; now and then some are refused for want of tokens."""
    refused = {"overflow_action": OverflowAction.REJECT, "max_queued_tokens": draw.pick((20, 40))}
    return (refused if draw.rarely(3) else {}) | {
        "stale_action": StaleAction.WAIT,
        "max_staleness": _least_staleness(values) + draw.integer(0, 1),
        "stale_wait_ms": draw.pick((0, 100, 60_000, 60_000)),
        "max_inflight_groups": 0,
        "reserve_queue_space": False,
    }


def _windowed(draw: Draw, values: Values) -> Values:
    """Batches take what began in order, within a window that is mostly narrow."""
    return {
        "order": Order.SUBMISSION,
        "order_window_groups": draw.pick((1, 1, 2, 3, 6)),
        "stale_wait_ms": draw.pick((0, 100, 60_000, 60_000)),
        "max_inflight_groups": 0,
        "reserve_queue_space": draw.rarely(3),
    }


def _longest_first(draw: Draw, values: Values) -> Values:
    return {"longest_first": True}


def _recording(draw: Draw, values: Values) -> Values:
    return {"record_groups": True}


def _rolling(draw: Draw, values: Values) -> Values:
    lease_ttl_ms = draw.pick((values["lease_ttl_ms"], 3_600_000))
    return {
        "max_unavailable_engines": draw.pick((0, 1, 1, 2)),
        "lease_ttl_ms": lease_ttl_ms,
        "fresh_start_ms": draw.pick((0, 50, 30_000, 30_000)),
    }


def _steered(draw: Draw, values: Values) -> Values:
    """A controller lowers caps that are mostly wide."""
    return {
        "target_staleness_milli": draw.pick((1, 500, 1_500)),
        "target_measure": draw.pick(tuple(TargetMeasure)),
        "max_queued_groups": values["max_queued_groups"] + 3,
        "max_lookahead": draw.pick((UNSET, UNSET, _least_staleness(values) + 2)),
        "max_inflight_groups": draw.pick((0, 0, 4)),
        "micro_batch_groups": draw.pick((0, 0, 2, 3)),
    }


def _staged(draw: Draw, values: Values) -> Values:
    """One stage or two, and room for groups to wait in them."""
    stages = draw.pick((("ref",), ("rewards",), ("rewards", "ref"), ("ref", "val"), ("val",)))
    # Whoever waits for what is in flight has no stages.
    action = StaleAction.DROP if values["stale_action"] is StaleAction.WAIT else values["stale_action"]
    return {"stages": stages, "stale_action": action, "max_queued_groups": values["max_queued_groups"] + 3}


def _reusing(draw: Draw, values: Values) -> Values:
    """Groups that several steps train on; sometimes not any more."""
    if draw.rarely(6):
        return {"max_uses": 1}
    return {
        "max_uses": draw.pick((2, 2, 3, 4)),
        "reuse_share_milli": draw.pick((1_000, 500, 2_000, 3_000)),
        "reuse_max_staleness": draw.pick((0, 1, 2, 4, 100)),
    }


FEATURES: dict[str, Callable[[Draw, Values], Values]] = {
    "ordered": _ordered,
    "measured": _measured,
    "recycling": _recycling,
    "cancelling": _cancelling,
    "narrow": _narrow,
    "filtering": _filtering,
    "by tokens": _by_tokens,
    "equal": _equal,
    "streamed": _streamed,
    "shared": _shared,
    "limited": _limited,
    "blocking": _blocking,
    "forgetting": _forgetting,
    "foresighted": _foresighted,
    "recording": _recording,
    "rolling": _rolling,
    "staged": _staged,
    "waiting": _waiting,
    "windowed": _windowed,
    "longest first": _longest_first,
    "steered": _steered,
    "reusing": _reusing,
}


def _with_turns_in_time(values: Values) -> Values:
    """Every group that is admitted has its turn before it is too stale, and room until then."""
    staleness = max(values["max_staleness"], _least_staleness(values))
    ahead = min(max(values["max_lookahead"], _least_staleness(values)), staleness)
    admitted = (ahead + 1) * values["batches_per_publish"] * values["batch_groups"]
    return {
        "max_staleness": staleness,
        "max_lookahead": ahead,
        "staleness_measure": StalenessMeasure.HEAD,
        "max_queued_groups": max(values["max_queued_groups"], admitted),
        "batch_tokens": 0,
    }


def _with_room_for_windows(values: Values) -> Values:
    """Room in the queue for all that is admitted."""
    ahead = max(values["max_lookahead"], _least_staleness(values))
    if values["reserve_queue_space"]:
        room = {}
    else:
        admitted = (ahead + 1) * values["batches_per_publish"] * values["batch_groups"]
        room = {"max_lookahead": ahead, "max_queued_groups": max(values["max_queued_groups"], admitted)}
    return room | {"quota_groups": 0, "batch_tokens": 0}


def _reusable(values: Values) -> Values:
    uses = values.get("max_uses", 1)
    if uses == 1 or values.get("batch_tokens"):
        return {"max_uses": 1, "reuse_share_milli": 0, "reuse_max_staleness": UNSET}
    least = -(-1_000 // values["batch_groups"])
    return {"reuse_share_milli": min(max(values["reuse_share_milli"], least), 1_000 * (uses - 1))}


def _least_staleness(values: Values) -> int:
    prefetch, per_publish = values["prefetch_batches"], values["batches_per_publish"]
    return int((prefetch + per_publish - 1) // per_publish)


def _possible(values: Values) -> Values:
    """The nearest policy that is not refused: features know little of each other."""
    micro = min(values.get("micro_batch_groups", 0), values["batch_groups"])
    needed = micro or values["batch_groups"]
    values = values | {"micro_batch_groups": micro, "max_queued_groups": max(needed, values["max_queued_groups"])}
    if values["max_queued_tokens"]:
        least_tokens = max(needed, 0 if micro else 2 * values.get("batch_tokens", 0))
        values["max_queued_tokens"] = max(values["max_queued_tokens"], least_tokens)
    if values["stale_action"] is StaleAction.WAIT:
        values |= _with_turns_in_time(values)
    if values.get("order") is Order.SUBMISSION and values.get("order_window_groups"):
        values |= _with_room_for_windows(values)
    if values.get("target_staleness_milli") and values["max_staleness"] != UNSET:
        values["target_staleness_milli"] = min(values["target_staleness_milli"], 1_000 * values["max_staleness"])
    if values.get("cancel_stale_leases"):
        values["staleness_measure"] = StalenessMeasure.HEAD
        values["max_staleness"] = max(values["max_staleness"], _least_staleness(values))
    if values["stale_action"] is StaleAction.WAIT or values.get("order_window_groups"):
        values["stages"] = ()
    values |= _reusable(values)
    batches = values["prefetch_batches"] + values["batches_per_publish"] + 1
    micro_batches = -(-values["batch_groups"] // micro) if micro else 1
    for name, least in {
        "quota_groups": batches * values["batch_groups"],
        "quota_tokens": batches * micro_batches * values["max_queued_tokens"],
        "quota_bytes": batches * micro_batches * values["max_queued_bytes"],
    }.items():
        if values.get(name):
            values[name] = max(values[name], least) if least else 0
    return values
