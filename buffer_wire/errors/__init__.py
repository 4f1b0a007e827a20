"""The one error tree of the project: raised by the service's rules, carried by gRPC, raised again by the clients.

    RolloutBufferError
    ├── InvalidRequest                     the caller must change the request
    │   ├── InvalidField                   a field breaks a bound
    │   ├── InvalidPolicy                  a policy under which the run could not progress
    │   ├── UnknownRun / RunExists / UnprovenRevision
    │   ├── UnknownLease / UnknownTask / UnknownGroup
    │   ├── UnknownBlob / BlobsFull
    │   ├── UnknownEvaluation / EvaluationExists / EvaluationsFull
    │   └── StepAhead / WorldSizeMismatch / NotCommitted / VersionConflict / CursorConflict
    ├── AccessRefused                      who calls is not known, or may not
    │   └── Unauthenticated / PermissionDenied
    ├── Fenced                             somebody else has taken over
    │   └── StaleTerm
    ├── NotReady                           the same request can succeed later
    │   ├── BatchNotReady / EvaluationNotReady
    │   └── PendingFull / PolicyChanged / CollectiveFailed
    ├── RunPaused                          needs an operator or a resume
    │   └── StoreRolledBack / FailureBudgetExceeded
    ├── ReplayGap                          replay data is gone
    └── StoreFault                         the store failed, or is not one we can use
        └── StoreUnavailable / StoreUnsuitable / LayoutChanged / NotReplicated / StoreOutOfMemory / StoreOutOfDisk

Invariants: `reason` is stable and unique. Every constructor takes the error's data as keywords and builds the
message itself. `from_wire` of (`reason`, `message`, `attributes`) gives back an instance of the same class.
"""

from collections.abc import Iterator

from buffer_wire.errors.access import (
    AccessRefused,
    PermissionDenied,
    Unauthenticated,
)
from buffer_wire.errors.base import (
    RolloutBufferError,
)
from buffer_wire.errors.requests import (
    BlobsFull,
    CursorConflict,
    EvaluationExists,
    EvaluationsFull,
    InvalidField,
    InvalidPolicy,
    InvalidRequest,
    NotCommitted,
    RunExists,
    StepAhead,
    UnknownBlob,
    UnknownEvaluation,
    UnknownGroup,
    UnknownLease,
    UnknownRun,
    UnknownTask,
    UnprovenRevision,
    VersionConflict,
    WorldSizeMismatch,
)
from buffer_wire.errors.runs import (
    BatchNotReady,
    CollectiveFailed,
    EvaluationNotReady,
    FailureBudgetExceeded,
    Fenced,
    NotReady,
    PendingFull,
    PolicyChanged,
    ReplayGap,
    RunPaused,
    StaleTerm,
    StoreRolledBack,
)
from buffer_wire.errors.stores import (
    LayoutChanged,
    NotReplicated,
    StoreFault,
    StoreOutOfDisk,
    StoreOutOfMemory,
    StoreUnavailable,
    StoreUnsuitable,
)

__all__ = [
    "AccessRefused",
    "BatchNotReady",
    "BlobsFull",
    "CollectiveFailed",
    "CursorConflict",
    "EvaluationExists",
    "EvaluationNotReady",
    "EvaluationsFull",
    "FailureBudgetExceeded",
    "Fenced",
    "InvalidField",
    "InvalidPolicy",
    "InvalidRequest",
    "LayoutChanged",
    "NotCommitted",
    "NotReady",
    "NotReplicated",
    "PendingFull",
    "PermissionDenied",
    "PolicyChanged",
    "ReplayGap",
    "RolloutBufferError",
    "RunExists",
    "RunPaused",
    "StaleTerm",
    "StepAhead",
    "StoreFault",
    "StoreOutOfDisk",
    "StoreOutOfMemory",
    "StoreRolledBack",
    "StoreUnavailable",
    "StoreUnsuitable",
    "Unauthenticated",
    "UnknownBlob",
    "UnknownEvaluation",
    "UnknownGroup",
    "UnknownLease",
    "UnknownRun",
    "UnknownTask",
    "UnprovenRevision",
    "VersionConflict",
    "WorldSizeMismatch",
]


def _walk(cls: type[RolloutBufferError]) -> Iterator[type[RolloutBufferError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _walk(child)


def by_reason() -> dict[str, type[RolloutBufferError]]:
    """Errors of the tree by reason. A class without a reason of its own travels as its parent."""
    return {cls.reason: cls for cls in _walk(RolloutBufferError) if "reason" in vars(cls)}
