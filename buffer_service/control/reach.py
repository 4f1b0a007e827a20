"""Changes of the policy that bring a target within reach that no knob reaches, with what each takes away."""

from collections.abc import Iterator

from buffer_service.control.measurement import Measurement
from buffer_service.domain.policy import RunPolicy

LEAST = 0.05
"""Versions that a change has to take away to be named."""


def what_would_reach(
    policy: RunPolicy, found: Measurement, missing: float, *, micro_batch_groups: int, share: float
) -> str:
    """Changes that take staleness away, most first, with their versions at most; `missing`: versions too many.

    `micro_batch_groups`: the fewest groups a rank worth streaming; `share`: what all ranks take so, over a batch.
    """
    changes = sorted(_changes(policy, found, micro_batch_groups, share), reverse=True)
    told = ", ".join(f"{what} takes away up to {versions:.2f}" for versions, what in changes if versions >= LEAST)
    return f"{missing:.2f} versions are too many; {told}" if told else "only a higher target is within reach"


def _changes(policy: RunPolicy, found: Measurement, micro: int, share: float) -> Iterator[tuple[float, str]]:
    batches = policy.batches_per_publish
    if policy.prefetch_batches:
        yield min(found.in_queue, policy.prefetch_batches / batches), "prefetch_batches 0"
    if not policy.micro_batch_groups:
        # In-queue staleness is in proportion to it (closed_forms.in_queue_streaming).
        yield (1 - share) * found.in_queue, f"micro_batch_groups {micro}"
    # A version of twice the groups spans twice the time.
    yield (found.pre_queue + found.in_queue) / 2, f"batch_groups {2 * policy.batch_groups}"
