"""Spread of versions within a group that is continued."""

from buffer_service.domain.policy import UNSET, RunPolicy


def too_spread(policy: RunPolicy, *, loaded_version: int, head_version: int) -> bool:
    """Tell whether tokens with this head must not be continued by an engine with these weights."""
    return policy.max_version_spread != UNSET and loaded_version - head_version > policy.max_version_spread
