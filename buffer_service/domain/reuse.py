"""Reuse: groups that more steps than their own train on, and which policies say it.

A step of N groups has at most N * reuse_share_milli / 1,000 others beside them, that earlier steps have trained on. So
uses are at most 1 + reuse_share_milli / 1,000 for each group that enters a step: Reverb's samples per insert.
"""

from typing import TYPE_CHECKING

from buffer_wire.errors import InvalidPolicy

if TYPE_CHECKING:
    from buffer_service.domain.policy import RunPolicy

MAX_STEP_GROUPS = 2_048
"""Largest number of groups of a step that may be used again, and of those that a step uses again: one call keeps, or
draws, them all."""


def reused_groups(policy: "RunPolicy", batch_groups: int) -> int:
    """Largest number of groups that a step of `batch_groups` uses again."""
    return batch_groups * policy.reuse_share_milli // 1_000 if policy.max_uses > 1 else 0


def refuse_what_cannot_be_reused(policy: "RunPolicy") -> None:
    """Raise InvalidPolicy for fields that need each other, and for batches that have no number of groups."""
    share, bound = policy.reuse_share_milli, policy.reuse_max_staleness
    if policy.max_uses == 1:
        if share:
            raise InvalidPolicy("reuse_share_milli", f"{share} needs max_uses above 1")
        if bound >= 0:
            raise InvalidPolicy("reuse_max_staleness", f"{bound} needs max_uses above 1")
        return
    if bound < 0:
        raise InvalidPolicy("max_uses", f"{policy.max_uses} needs reuse_max_staleness, the age up to which it holds")
    most = 1_000 * (policy.max_uses - 1)
    if not 0 < share <= most:
        why = f"{share} is not between 1 and {most}, what max_uses {policy.max_uses} can give beside each 1,000 groups"
        raise InvalidPolicy("reuse_share_milli", why)
    if policy.batch_tokens:
        raise InvalidPolicy("max_uses", "needs batches of batch_groups groups, without batch_tokens")
    if policy.batch_groups > MAX_STEP_GROUPS:
        raise InvalidPolicy("max_uses", f"needs batches of at most {MAX_STEP_GROUPS} groups, not {policy.batch_groups}")
    reused = reused_groups(policy, policy.batch_groups)
    if not 1 <= reused <= MAX_STEP_GROUPS:
        why = f"{share} is {reused} groups beside {policy.batch_groups}: at least 1, at most {MAX_STEP_GROUPS}"
        raise InvalidPolicy("reuse_share_milli", why)
