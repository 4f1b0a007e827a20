"""Knobs of a controller: values in effect below the policy's own. The policy's are the upper bounds, always."""

from dataclasses import dataclass, replace

from buffer_service.domain.gate import MILLI
from buffer_service.domain.policy import UNSET, Order, RunPolicy, StaleAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Values that a controller set; what it left alone has the default."""

    micro_batch_groups: int = 0
    max_queued_groups: int = 0
    lookahead_milli: int = UNSET
    """max_lookahead in thousandths of a version: a fraction of it is room for a part of a batch."""
    max_inflight_groups: int = 0


NOTHING_LOWERED = Knobs()


def in_effect(policy: RunPolicy, knobs: Knobs, world_size: int) -> RunPolicy:
    """The policy with the knobs. Its max_lookahead is rounded up; admission takes `lookahead_milli` beside it.

    A knob that the policy has overtaken, such as after a change of it, counts as far as the run can progress with it.
    """
    if not policy.target_staleness_milli or knobs == NOTHING_LOWERED:
        return policy
    ahead = lookahead_milli(policy, knobs)
    return replace(
        policy,
        micro_batch_groups=_micro_batch(policy, knobs),
        max_queued_groups=_queue(policy, knobs, world_size),
        max_lookahead=ahead if ahead == UNSET else -(-ahead // MILLI),
        max_inflight_groups=inflight_groups(policy, knobs),
    )


def lookahead_milli(policy: RunPolicy, knobs: Knobs) -> int:
    """Lookahead in effect, in thousandths of a version; UNSET: no bound."""
    stated = policy.max_lookahead * MILLI if policy.max_lookahead != UNSET else UNSET
    if not policy.target_staleness_milli or knobs.lookahead_milli == UNSET:
        return stated
    least = max(knobs.lookahead_milli, policy.least_staleness * MILLI)
    return least if stated == UNSET else min(stated, least)


def inflight_groups(policy: RunPolicy, knobs: Knobs) -> int:
    """Groups in flight at most; 0: no bound."""
    return _lower(policy.max_inflight_groups, knobs.max_inflight_groups) or knobs.max_inflight_groups


def least_queue(policy: RunPolicy, world_size: int) -> int:
    """Groups that the queue has room for at least: a batch, or two of the policy's micro-batches."""
    if policy.micro_batch_groups:
        return min(policy.max_queued_groups, 2 * policy.micro_batch_groups * world_size)
    return policy.batch_groups


def _micro_batch(policy: RunPolicy, knobs: Knobs) -> int:
    # Each micro-batch may be a full queue, of which quotas in tokens and bytes must hold as many.
    if policy.quota_tokens or policy.quota_bytes:
        return policy.micro_batch_groups
    return _lower(policy.micro_batch_groups, knobs.micro_batch_groups)


def _queue(policy: RunPolicy, knobs: Knobs, world_size: int) -> int:
    # Whoever waits for groups in flight needs room for all that is admitted. Before a term's first pull nobody knows
    # what one takes.
    waits = policy.stale_action is StaleAction.WAIT or policy.order is Order.SUBMISSION
    if not knobs.max_queued_groups or waits or not world_size:
        return policy.max_queued_groups
    return min(policy.max_queued_groups, max(knobs.max_queued_groups, least_queue(policy, world_size)))


def _lower(stated: int, knob: int) -> int:
    return min(stated, knob) if stated and knob else stated
