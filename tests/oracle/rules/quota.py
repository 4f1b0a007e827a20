"""Quotas on everything of a run that is not trained yet: queued, forming and delivered groups. 0 stands for none."""

from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import RunPolicy


def within_quotas(policy: RunPolicy, live: Amount) -> bool:
    """Tell whether that much may be live."""
    return (
        (policy.quota_groups == 0 or live.groups <= policy.quota_groups)
        and (policy.quota_tokens == 0 or live.tokens <= policy.quota_tokens)
        and (policy.quota_bytes == 0 or live.bytes <= policy.quota_bytes)
    )
