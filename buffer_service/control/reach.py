"""Changes of the policy, and of engines, that would bring a target within reach that no knob reaches."""

from buffer_service.control.measurement import Measurement
from buffer_service.domain.policy import UNSET, RunPolicy

_NOTICEABLE = 0.1
"""Versions that a change has to take away to be named."""


def what_would_reach(policy: RunPolicy, found: Measurement) -> str:
    """Changes that would take staleness away, each with what it takes away at most, in versions."""
    changes = []
    if policy.prefetch_batches:
        ahead = policy.prefetch_batches / policy.batches_per_publish
        changes.append(f"prefetch_batches 0 (a batch waits up to {ahead:.2g} versions at the trainer)")
    if policy.batches_per_publish > 1:
        changes.append(f"a publish after every batch (batches_per_publish {policy.batches_per_publish})")
    if not policy.micro_batch_groups and found.in_queue >= _NOTICEABLE:
        changes.append(f"micro_batch_groups, for a trainer that accumulates gradients (in queue {found.in_queue:.2f})")
    if policy.max_staleness == UNSET and found.pre_queue >= _NOTICEABLE:
        changes.append("engines that load sooner after a publish (or max_staleness, for which late ones wait)")
    if found.pre_queue >= _NOTICEABLE:
        changes.append(f"a larger batch, or shorter longest responses (pre-queue {found.pre_queue:.2f})")
    return "; ".join(changes) or "a higher target alone"
