"""Changes of the policy that bring a target within reach that no knob reaches, with what each takes away."""

from collections.abc import Iterator

from buffer_service.control.measurement import Measurement
from buffer_service.domain.policy import RunPolicy

LEAST = 0.05
"""Versions that a change has to take away to be named."""

STREAMED = 7 / 8
"""Share of in-queue staleness that eight micro-batches a batch take away (closed_forms.in_queue_streaming)."""


def what_would_reach(policy: RunPolicy, found: Measurement, missing: float) -> str:
    """Changes that take staleness away, most first, with their versions at most; `missing`: versions too many."""
    changes = sorted(_changes(policy, found), reverse=True)
    told = ", ".join(f"{what} takes away up to {versions:.2f}" for versions, what in changes if versions >= LEAST)
    return f"{missing:.2f} versions are too many; {told}" if told else "only a higher target is within reach"


def _changes(policy: RunPolicy, found: Measurement) -> Iterator[tuple[float, str]]:
    batches = policy.batches_per_publish
    if policy.prefetch_batches:
        yield min(found.in_queue, policy.prefetch_batches / batches), "prefetch_batches 0"
    if not policy.micro_batch_groups:
        yield STREAMED * found.in_queue, f"micro_batch_groups {max(1, policy.batch_groups // 8)}"
    # A version of twice the groups spans twice the time.
    yield (found.pre_queue + found.in_queue) / 2, f"batch_groups {2 * policy.batch_groups}"
