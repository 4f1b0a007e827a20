"""RunPolicy: the rules of a run, their defaults and bounds, and which combinations are refused.

Invariants: a RunPolicy that exists is valid (`__post_init__` refuses anything else), every value is an integer, and
`max_staleness` and `max_lookahead` are the only ones that may be unset (-1).
"""

from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from buffer_wire.errors import InvalidField, InvalidPolicy

UNSET = -1
"""Stands for "no bound" in the integer fields that may be unset."""

GIB = 1 << 30


class OverflowAction(StrEnum):
    """What a push into a full queue meets."""

    DROP_OLDEST = "drop_oldest"
    BLOCK = "block"
    REJECT = "reject"


class StaleAction(StrEnum):
    """What happens to a group that is too stale when its batch is assembled."""

    DROP = "drop"
    RECYCLE = "recycle"


_BOUNDS: dict[str, tuple[int, int]] = {
    "batch_groups": (1, 65_536),
    "max_queued_groups": (1, 10_000_000),
    "max_queued_tokens": (0, 1 << 50),
    "max_queued_bytes": (1 << 20, 1 << 50),
    "max_staleness": (0, 1_000_000),
    "max_inflight_groups": (0, 10_000_000),
    "max_lookahead": (0, 1_000_000),
    "lease_ttl_ms": (1_000, 3_600_000),
    "max_attempts": (1, 1_000),
    "retry_backoff_ms": (0, 600_000),
    "failure_budget": (0, 10_000_000),
    "max_pending_tasks": (1, 10_000_000),
    "prefetch_batches": (0, 64),
    "batches_per_publish": (1, 1_000),
    "retained_steps": (1, 100_000),
}

_MAY_BE_UNSET = frozenset({"max_staleness", "max_lookahead", "failure_budget"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """The effective policy of a run; the wire's RunPolicy documents each field with its unit and bounds."""

    batch_groups: int = 32
    max_queued_groups: int = 0
    """0 in the constructor: batch_groups (queue factor q = 1)."""
    max_queued_tokens: int = 0
    max_queued_bytes: int = 8 * GIB
    overflow_action: OverflowAction = OverflowAction.DROP_OLDEST
    max_staleness: int = UNSET
    stale_action: StaleAction = StaleAction.DROP
    max_inflight_groups: int = 0
    reserve_queue_space: bool = False
    max_lookahead: int = UNSET
    lease_ttl_ms: int = 60_000
    max_attempts: int = 5
    retry_backoff_ms: int = 500
    failure_budget: int = UNSET
    max_pending_tasks: int = 10_000
    prefetch_batches: int = 0
    batches_per_publish: int = 1
    retained_steps: int = 64

    def __post_init__(self) -> None:
        if self.max_queued_groups == 0:
            object.__setattr__(self, "max_queued_groups", self.batch_groups)
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value == UNSET and name in _MAY_BE_UNSET:
                continue
            if not low <= value <= high:
                raise InvalidField(f"policy.{name}", value, f"between {low} and {high}")
        self._refuse_deadlocks()

    def _refuse_deadlocks(self) -> None:
        n = self.batch_groups
        if self.max_queued_groups < n:
            raise InvalidPolicy(
                "max_queued_groups", f"{self.max_queued_groups} groups can never hold a batch of {n} groups"
            )
        if 0 < self.max_queued_tokens < n:
            raise InvalidPolicy(
                "max_queued_tokens", f"{self.max_queued_tokens} tokens can never hold a batch of {n} groups"
            )
        if self.max_staleness != UNSET and self.max_staleness < self.least_staleness:
            raise InvalidPolicy(
                "max_staleness",
                f"{self.max_staleness} is below {self.least_staleness}, the staleness that even fresh groups have with "
                f"prefetch_batches {self.prefetch_batches} and batches_per_publish {self.batches_per_publish}",
            )
        if self.max_lookahead != UNSET and self.max_lookahead < self.least_staleness:
            raise InvalidPolicy(
                "max_lookahead",
                f"{self.max_lookahead} lets too few groups exist for the {self.least_staleness} versions that a "
                f"trainer with prefetch_batches {self.prefetch_batches} and "
                f"batches_per_publish {self.batches_per_publish} needs",
            )

    @property
    def least_staleness(self) -> int:
        """Staleness, in versions, of a group generated with the newest published weights when its batch is pulled.

        At most d + b - 1 batches are assembled and not yet covered by a publish (d prefetched, b per publish), so the
        version that trains on the next batch is ahead of the published one by floor((d + b - 1) / b).
        """
        return (self.prefetch_batches + self.batches_per_publish - 1) // self.batches_per_publish

    def to_store(self) -> dict[str, int | str]:
        """The policy as the store's scripts read it: integers, and the actions by name."""
        return {k: str(v) if isinstance(v, StrEnum) else int(v) for k, v in asdict(self).items()}

    @classmethod
    def from_store(cls, stored: dict[str, int | str]) -> "RunPolicy":
        """The inverse of `to_store`; ignores keys that this version does not know."""
        known = {f.name for f in fields(cls)}
        values: dict[str, object] = {k: v for k, v in stored.items() if k in known}
        values["overflow_action"] = OverflowAction(str(values["overflow_action"]))
        values["stale_action"] = StaleAction(str(values["stale_action"]))
        values["reserve_queue_space"] = bool(values["reserve_queue_space"])
        return cls(**values)  # type: ignore[arg-type]
