"""Admission: how many more groups may be started, the smallest room under the caps that are set.

Computed from what exists (cardinalities), never from running totals, so groups that are dropped or lost free capacity
by being gone.

Invariant: an engine that is behind the published version is given a lease only if its group would pass the gate. That
group starts with the weights that the engine has and is trained at its turn, which is after all groups that exist.

This binds where both hold: max_lookahead is set, and the gate is by the head. Only max_lookahead says how far off a
turn may be, and only the head is known in advance. It does not bind in the order lifo, where the newest group's turn is
the next batch.
"""

from dataclasses import dataclass

from buffer_service.domain.gate import MILLI, oldest_useful_version
from buffer_service.domain.policy import UNSET, Order, RunPolicy, StalenessMeasure
from buffer_service.domain.timeline import next_train_version


@dataclass(frozen=True, slots=True)
class OpenStep:
    """The step whose micro-batches are not all closed: its groups when it is full, and those that it has."""

    target: int = 0
    groups: int = 0


NO_OPEN_STEP = OpenStep()


def capacity(
    policy: RunPolicy,
    *,
    unpublished_steps: int,
    open_step: OpenStep,
    queued: int,
    leased: int,
    behind: int = 0,
    lookahead_milli: int = UNSET,
    missing: int = 0,
) -> int | None:
    """Groups that may still be leased for an engine, None without a cap; zero or less means none.

    The result is the smallest of the rooms under the caps that are set:

        max_inflight_groups      max_inflight_groups - leased
        reserve_queue_space      max_queued_groups - (queued + leased)
        max_lookahead k          ((k + 1) * b - unpublished_steps) * N + missing - (forming + queued + leased)

    for batches of N groups and b batches per publish. `unpublished_steps`: complete steps that the last publish did not
    cover. `missing`: groups that complete steps are still to get for rejected ones. `behind`: versions by which the
    engine's weights are older than the published ones. `lookahead_milli`: k in thousandths, where a controller lowered
    it by a fraction; UNSET: the policy's.

    The last is the bound of AReaL, (k + version + 1) * N - (accepted + running), where every step has N groups and
    every version b steps. Counted in steps, it also holds when batches differ in size, versions leave gaps, or a resume
    starts between two publishes. An open step larger than N is a batch of its own size.
    """
    rooms = []
    if policy.max_inflight_groups > 0:
        rooms.append(policy.max_inflight_groups - leased)
    if policy.reserve_queue_space:
        rooms.append(policy.max_queued_groups - (queued + leased))
    if policy.max_lookahead != UNSET:
        ahead = _lookahead(policy, behind, lookahead_milli)
        steps = (ahead + MILLI) * policy.batches_per_publish - unpublished_steps * MILLI
        admitted = steps * _step_groups(policy, open_step) // MILLI + missing
        rooms.append(admitted - (open_step.groups + queued + leased))
    return min(rooms, default=None)


def required_version(
    policy: RunPolicy,
    *,
    published: int,
    unpublished_steps: int,
    open_step: OpenStep,
    queued: int,
    leased: int,
    missing: int = 0,
) -> int:
    """The oldest weights with which another group may be started, where its engine's lag is all that forbids it.

    The result is train_version of the group's turn - max_staleness, at least 0 and at most the published version.
    Engines that have it get work as far as the policy allows, also where max_lookahead is above max_staleness. Where
    turns are not judged, the train_version is that of the next step. Groups that complete steps lack come first.
    """
    steps = unpublished_steps
    if _judges_turns(policy):
        steps += max(0, open_step.groups + queued + leased - missing) // _step_groups(policy, open_step)
    turn = next_train_version(published, steps, policy.batches_per_publish)
    return min(published, oldest_useful_version(policy, turn))


def _judges_turns(policy: RunPolicy) -> bool:
    gated = policy.max_staleness != UNSET and policy.staleness_measure is StalenessMeasure.HEAD
    return policy.max_lookahead != UNSET and gated and policy.order is not Order.LIFO


def _lookahead(policy: RunPolicy, behind: int, lookahead_milli: int) -> int:
    """Thousandths of a version ahead for an engine: k, and for one that is behind at most so many that its groups are
    fresh then.

    A group whose turn is a versions ahead has the staleness a + behind, so a <= max_staleness - behind.
    """
    ahead = policy.max_lookahead * MILLI if lookahead_milli == UNSET else lookahead_milli
    if behind > 0 and _judges_turns(policy):
        return min(ahead, (policy.max_staleness - behind) * MILLI)
    return ahead


def _step_groups(policy: RunPolicy, open_step: OpenStep) -> int:
    return max(policy.batch_groups, open_step.target)
