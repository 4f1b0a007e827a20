"""Caps on the queue, and quotas on everything of a run that is not trained yet.

A cap bounds what is queued; a quota bounds the live groups: queued, forming and delivered. 0 stands for none.
"""

from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import RunPolicy


def within_caps(policy: RunPolicy, queued: Amount) -> bool:
    """Whether that much may be queued."""
    return (
        queued.groups <= policy.max_queued_groups
        and (policy.max_queued_tokens == 0 or queued.tokens <= policy.max_queued_tokens)
        and queued.bytes <= policy.max_queued_bytes
    )


def within_quotas(policy: RunPolicy, live: Amount) -> bool:
    """Whether that much may be live."""
    return (
        (policy.quota_groups == 0 or live.groups <= policy.quota_groups)
        and (policy.quota_tokens == 0 or live.tokens <= policy.quota_tokens)
        and (policy.quota_bytes == 0 or live.bytes <= policy.quota_bytes)
    )
