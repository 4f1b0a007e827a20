"""Protocol of a simulated buffer; one run, one trainer of one rank, tasks without end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from buffer_service.domain.policy import UNSET, OverflowAction, RunPolicy
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.simulator.groups import SimulatedGroup
from buffer_service.simulator.queue import Queue
from buffer_wire.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Losses:
    """Groups that were generated for nothing, so far."""

    overflow: int = 0
    stale: int = 0
    recycled: int = 0
    tokens: int = 0
    """Tokens of all lost groups."""

    @property
    def dropped(self) -> int:
        """Groups whose tasks ended with them."""
        return self.overflow + self.stale


class Buffer(Protocol):
    """The buffer's side of the simulation. Every call happens at the simulation's present moment."""

    held_at: int
    """Published version at which the caps of admission last held an engine back; UNSET: never."""

    def lease(self, group: SimulatedGroup) -> bool:
        """Lease the group a task, recycled ones first. False, and no lease, if it is too stale or there is no room."""

    def push(self, group: SimulatedGroup) -> bool:
        """A group is complete: whether it was queued; else it waits in line."""

    def retry(self) -> int:
        """Queue what waits in line as far as there is room; how many wait still."""

    def pull(self, step: int, number: int, train_version: int) -> tuple[Sequence[SimulatedGroup], bool] | None:
        """Micro-batch `number` of a step, and whether it is its last; None when too little is queued."""

    def finish(self, step: int, version: int | None) -> None:
        """A step is trained; `version` is published with it, None: nothing."""

    def steer(self, knobs: Knobs) -> None:
        """Have a controller's knobs in effect from now on."""

    def losses(self) -> Losses:
        """Losses so far."""


DROPS: Mapping[OverflowAction, Callable[[Queue], SimulatedGroup] | None] = {
    OverflowAction.BLOCK: None,
    OverflowAction.DROP_OLDEST: Queue.oldest,
    OverflowAction.REJECT: None,
}
"""Overflow actions that are simulated, and the group that each drops.

None: the push waits in line. A rejected one is tried again, which is taken to be at once and in order.
"""


def refuse_what_is_not_simulated(policy: RunPolicy, outstanding: int) -> None:
    """Raise InvalidField for what the simulation has no answer to; `outstanding`: leases that workers may hold."""
    held = (
        outstanding > 0 or policy.max_inflight_groups > 0 or policy.reserve_queue_space or policy.max_lookahead != UNSET
    )
    only = {
        "overflow_action": (" or ".join(DROPS), policy.overflow_action in DROPS),
        "max_inflight_groups": (
            "set where pushes are rejected",
            held or policy.overflow_action is not OverflowAction.REJECT,
        ),
        "cancel_stale_leases": ("false", not policy.cancel_stale_leases),
        "environments": ("none", not policy.environments),
        "stages": ("none", not policy.stages),
        "batch_tokens": ("0", policy.batch_tokens == 0),
        "max_queued_tokens": ("0", policy.max_queued_tokens == 0),
        "quota_groups": ("0", policy.quota_groups == 0),
        "quota_tokens": ("0", policy.quota_tokens == 0),
        "quota_bytes": ("0", policy.quota_bytes == 0),
    }
    for name, (limit, simulated) in only.items():
        if not simulated:
            raise InvalidField(f"policy.{name}", str(getattr(policy, name)), f"{limit}, to be simulated")
