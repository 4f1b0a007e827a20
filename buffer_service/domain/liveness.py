"""Liveness: policies are refused under which a run could not progress, with the reason.

The argument for all other policies: let d be prefetch_batches and b batches_per_publish. When a trainer waits for a
batch, at most d + b - 1 assembled ones are not covered by a publish. At most d + b are not committed.

- So the version that will train on the batch is at most floor((d + b - 1) / b) ahead of the published one.
- Groups made with the newest weights therefore pass every gate that is not refused.
- The caps of admission, the queue and the quotas leave room for at least one batch beside what the trainer holds.
  Where batches are streamed it is one micro-batch.
- Hence while the batch is short, something is queued, leased, pending or still to be submitted.
- Each lease ends as a group or as freed capacity.

No policy can know the sizes of groups, nor what stages add to them, nor what a filter accepts: a waiting pull names
these as its reason.
"""

from typing import TYPE_CHECKING

from buffer_wire.errors import InvalidPolicy

if TYPE_CHECKING:
    from buffer_service.domain.policy import RunPolicy


def refuse_what_cannot_progress(policy: "RunPolicy") -> None:
    """Raise InvalidPolicy with the field that stands in the way."""
    _refuse_empty_filters(policy)
    _refuse_small_queues(policy)
    _refuse_small_quotas(policy)
    _refuse_closed_gates(policy)
    _refuse_short_lookahead(policy)
    _refuse_targets_above_the_gate(policy)
    _refuse_waits_for_more_than_fits(policy)
    _refuse_windows_without_room(policy)
    _refuse_waits_for_stages(policy)


def _refuse_empty_filters(policy: "RunPolicy") -> None:
    """A filter that lets nothing through starves the trainer."""
    if 0 < policy.filter_max_response_tokens < policy.filter_min_response_tokens:
        raise InvalidPolicy(
            "filter_max_response_tokens",
            f"{policy.filter_max_response_tokens} is below filter_min_response_tokens "
            f"{policy.filter_min_response_tokens}: no group passes",
        )
    if policy.filter_max_mean_reward_milli < policy.filter_min_mean_reward_milli:
        raise InvalidPolicy(
            "filter_max_mean_reward_milli",
            f"{policy.filter_max_mean_reward_milli} is below filter_min_mean_reward_milli "
            f"{policy.filter_min_mean_reward_milli}: no group passes",
        )


def _refuse_small_queues(policy: "RunPolicy") -> None:
    """Raise InvalidPolicy unless the queue can hold what one assembly takes: a batch, or a micro-batch."""
    n = policy.micro_batch_groups or policy.batch_groups
    taken = f"a micro-batch of {n} groups a rank" if policy.micro_batch_groups else f"a batch of {n} groups"
    if policy.micro_batch_groups > policy.batch_groups:
        raise InvalidPolicy(
            "micro_batch_groups",
            f"{policy.micro_batch_groups} groups are more than batch_groups {policy.batch_groups}",
        )
    if policy.max_queued_groups < n:
        raise InvalidPolicy("max_queued_groups", f"{policy.max_queued_groups} groups can never hold {taken}")
    if 0 < policy.max_queued_tokens < n:
        raise InvalidPolicy("max_queued_tokens", f"{policy.max_queued_tokens} tokens can never hold {taken}")
    if not policy.micro_batch_groups and 0 < policy.max_queued_tokens < 2 * policy.batch_tokens:
        # Below twice the budget, a queue can be too full for the next group and too empty for a batch.
        raise InvalidPolicy(
            "max_queued_tokens",
            f"{policy.max_queued_tokens} is below {2 * policy.batch_tokens}: a queue that has no room for another "
            f"group may still hold less than batch_tokens {policy.batch_tokens}",
        )


def _refuse_small_quotas(policy: "RunPolicy") -> None:
    """A quota must leave room for the next batch beside the uncommitted ones that the trainer holds."""
    if policy.quota_tokens and not policy.max_queued_tokens:
        raise InvalidPolicy("quota_tokens", "needs max_queued_tokens: one batch could fill the whole quota")
    batches = policy.uncommitted_batches + 1
    least = {
        "quota_groups": batches * policy.batch_groups,
        "quota_tokens": policy.queues_in_quota * policy.max_queued_tokens,
        "quota_bytes": policy.queues_in_quota * policy.max_queued_bytes,
    }
    of_micro_batches = (
        f", of up to {policy.micro_batches_of_batch} micro-batches each" if policy.micro_batch_groups else ""
    )
    for name, bound in least.items():
        quota = getattr(policy, name)
        if 0 < quota < bound:
            raise InvalidPolicy(
                name,
                f"{quota} is below {bound}, what {batches - 1} uncommitted batches (prefetch_batches "
                f"{policy.prefetch_batches} + batches_per_publish {policy.batches_per_publish}) and the next one need"
                + (of_micro_batches if name != "quota_groups" else ""),
            )


def _refuse_closed_gates(policy: "RunPolicy") -> None:
    """Groups made with the newest published weights must be fresh enough."""
    gated = policy.max_staleness >= 0
    if policy.cancel_stale_leases and not (gated and policy.staleness_measure == "head"):
        raise InvalidPolicy(
            "cancel_stale_leases",
            "needs max_staleness, and staleness_measure head: only a head is known in advance",
        )
    if gated and policy.max_staleness < policy.least_staleness:
        raise InvalidPolicy(
            "max_staleness",
            f"{policy.max_staleness} is below {policy.least_staleness}, the staleness that even fresh groups have with "
            f"prefetch_batches {policy.prefetch_batches} and batches_per_publish {policy.batches_per_publish}",
        )


def _refuse_targets_above_the_gate(policy: "RunPolicy") -> None:
    """Raise InvalidPolicy for a mean above the bound of what is trained."""
    if 0 <= policy.max_staleness * 1_000 < policy.target_staleness_milli and policy.staleness_measure == "head":
        why = f"{policy.target_staleness_milli} is above max_staleness {policy.max_staleness}, which no group exceeds"
        raise InvalidPolicy("target_staleness_milli", why)


def _refuse_short_lookahead(policy: "RunPolicy") -> None:
    """Raise InvalidPolicy unless max_lookahead lets as many batches exist as the trainer holds, and one more."""
    if 0 <= policy.max_lookahead < policy.least_staleness:
        raise InvalidPolicy(
            "max_lookahead",
            f"{policy.max_lookahead} lets too few groups exist for the {policy.least_staleness} versions that a "
            f"trainer with prefetch_batches {policy.prefetch_batches} and "
            f"batches_per_publish {policy.batches_per_publish} needs",
        )


def _refuse_waits_for_more_than_fits(policy: "RunPolicy") -> None:
    """Waiting helps where every group has its turn in time, and room until then.

    A batch waits for groups that are leased, but not where there is no room for them: both would wait for each other.
    So a policy that leaves no room would not wait.
    """
    if policy.stale_action != "wait":
        return
    if policy.max_staleness < 0 or policy.staleness_measure != "head":
        why = "wait needs max_staleness, and staleness_measure head: only a head is known of a group in flight"
        raise InvalidPolicy("stale_action", why)
    if not 0 <= policy.max_lookahead <= policy.max_staleness:
        why = f"wait needs max_lookahead, at most max_staleness {policy.max_staleness}: more cannot be trained in time"
        raise InvalidPolicy("stale_action", why)
    _require_room_for_what_is_admitted(policy, "wait")
    if policy.batch_tokens:
        raise InvalidPolicy("stale_action", "wait needs batches of batch_groups groups, without batch_tokens")


def _refuse_windows_without_room(policy: "RunPolicy") -> None:
    """A batch that waits for the oldest group in flight needs room for it, as above.

    Everything in flight ends, as a group or as freed capacity, and beyond what admission allows nothing begins. So the
    oldest one ends too, or nothing is in flight any more; then there is no window.
    """
    if policy.order != "submission" or not policy.order_window_groups:
        return
    name = "order_window_groups"
    if policy.batch_tokens:
        raise InvalidPolicy(name, "needs batches of batch_groups groups, without batch_tokens")
    if policy.max_lookahead < 0 and not policy.reserve_queue_space:
        why = "needs reserve_queue_space or max_lookahead: a group that a batch waits for must find room in the queue"
        raise InvalidPolicy(name, why)
    held = policy.max_queued_groups
    if not policy.reserve_queue_space:
        held = _require_room_for_what_is_admitted(policy, name)
    beside = policy.uncommitted_batches * policy.batch_groups
    if 0 < policy.quota_groups < held + beside:
        why = f"{policy.quota_groups} is below {held + beside}: {name} needs room for all that is admitted"
        raise InvalidPolicy("quota_groups", f"{why}, beside {beside} uncommitted groups")


def _refuse_waits_for_stages(policy: "RunPolicy") -> None:
    """A batch that waits for groups in flight does not know those that stages hold."""
    if policy.stages and policy.stale_action == "wait":
        raise InvalidPolicy("stages", "stale_action wait does not wait for groups in stages: take recycle or drop")
    if policy.stages and policy.order == "submission" and policy.order_window_groups:
        raise InvalidPolicy("stages", "order_window_groups does not wait for groups in stages: leave it at 0")


def _require_room_for_what_is_admitted(policy: "RunPolicy", who: str) -> int:
    """Return how many groups max_lookahead lets exist. Raises InvalidPolicy where the queue cannot hold them."""
    admitted = (policy.max_lookahead + 1) * policy.batches_per_publish * policy.batch_groups
    if policy.max_queued_groups < admitted:
        why = f"{policy.max_queued_groups} is below {admitted}: {who} needs room for all that max_lookahead admits"
        raise InvalidPolicy("max_queued_groups", why)
    return admitted


def most_batch_groups(policy: "RunPolicy", most: int) -> int:
    """Largest batch that a pull may ask for as its step's own size, in groups, at most `most`, so that it can get them.

    Beside the d + b - 1 assembled batches that no publish covers, max_lookahead k lets (k + 1) * b - (d + b - 1)
    batches of N groups exist. Quotas are meant for batches of N groups, quota_groups for d + b + 1 of any size.
    """
    bounds = [most]
    if policy.max_lookahead >= 0:
        batches = (policy.max_lookahead + 1) * policy.batches_per_publish - (policy.uncommitted_batches - 1)
        bounds.append(batches * policy.batch_groups)
    if policy.quota_groups:
        bounds.append(policy.quota_groups // (policy.uncommitted_batches + 1))
    if policy.micro_batch_groups and (policy.quota_tokens or policy.quota_bytes):
        bounds.append(policy.batch_groups)
    if policy.target_staleness_milli or policy.max_uses > 1:
        # A controller may lower the caps to what batches of N groups need; a commit keeps all groups of a step at once.
        bounds.append(policy.batch_groups)
    return min(bounds)
