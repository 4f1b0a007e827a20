"""The one table of what may become of a group and of a task.

The scripts on the store are driven by it, for the script loader renders it into Lua; so is the reference model of the
tests. `NEW` is the state before acceptance or submission; a terminal state has no way out.
"""

from enum import StrEnum


class GroupState(StrEnum):
    """Disposition of an accepted group; the entries of the group ledger."""

    QUEUED = "queued"
    FORMING = "forming"
    DELIVERED = "delivered"
    TRAINED = "trained"
    DROPPED_OVERFLOW = "dropped_overflow"
    DROPPED_STALE = "dropped_stale"
    RECYCLED = "recycled"
    FILTERED = "filtered"
    REJECTED = "rejected"
    DISCARDED = "discarded"
    LOST = "lost"


class TaskState(StrEnum):
    """State of a submitted task; the entries of the task ledger."""

    PENDING = "pending"
    LEASED = "leased"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


NEW = "new"

_G, _T = GroupState, TaskState

GROUP_TRANSITIONS: dict[str, frozenset[str]] = {
    NEW: frozenset({_G.QUEUED, _G.FILTERED}),
    _G.QUEUED: frozenset(
        {
            *(_G.FORMING, _G.DELIVERED, _G.DROPPED_OVERFLOW, _G.DROPPED_STALE, _G.RECYCLED, _G.DISCARDED, _G.LOST),
            # By the rewards of a stage.
            _G.FILTERED,
        }
    ),
    _G.FORMING: frozenset({_G.QUEUED, _G.DELIVERED, _G.DROPPED_OVERFLOW, _G.REJECTED, _G.DISCARDED, _G.LOST}),
    # A resume takes delivered batches back, and trained ones of the abandoned timeline.
    _G.DELIVERED: frozenset({_G.TRAINED, _G.QUEUED, _G.DROPPED_OVERFLOW, _G.REJECTED, _G.DISCARDED, _G.LOST}),
    _G.TRAINED: frozenset({_G.DELIVERED, _G.QUEUED, _G.DROPPED_OVERFLOW, _G.DISCARDED}),
    _G.DROPPED_OVERFLOW: frozenset(),
    _G.DROPPED_STALE: frozenset(),
    _G.RECYCLED: frozenset(),
    _G.FILTERED: frozenset(),
    _G.REJECTED: frozenset(),
    _G.DISCARDED: frozenset(),
    _G.LOST: frozenset(),
}

TASK_TRANSITIONS: dict[str, frozenset[str]] = {
    # A push without a lease makes a task that is completed at once.
    NEW: frozenset({_T.PENDING, _T.COMPLETED}),
    # pending → completed: the first valid result wins even after its lease expired.
    _T.PENDING: frozenset({_T.LEASED, _T.COMPLETED, _T.FAILED, _T.CANCELLED}),
    _T.LEASED: frozenset({_T.PENDING, _T.COMPLETED, _T.FAILED, _T.CANCELLED}),
    # completed → pending: recycled, or its payload was lost.
    _T.COMPLETED: frozenset({_T.PENDING}),
    _T.FAILED: frozenset(),
    _T.CANCELLED: frozenset(),
}
