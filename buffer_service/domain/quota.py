"""Caps on the queue. 0 stands for none."""

from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import RunPolicy


def within_caps(policy: RunPolicy, queued: Amount) -> bool:
    """Test whether that much may be queued."""
    return (
        queued.groups <= policy.max_queued_groups
        and (policy.max_queued_tokens == 0 or queued.tokens <= policy.max_queued_tokens)
        and queued.bytes <= policy.max_queued_bytes
    )
