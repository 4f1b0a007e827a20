"""Requests and results of every operation on a run, as plain values.

They are what the RPC side hands to a store and what the reference model understands. Times are integer
milliseconds, versions and sizes integers, rewards milli-rewards. `weights` are (epoch, version) pairs.
"""

from buffer_service.domain.ops.batches import Batch, Pull, Resume, Resumed, ResumeMode, ShardGroup, Short
from buffer_service.domain.ops.groups import (
    PORTION,
    Buffer,
    GroupFacts,
    NewGroup,
    Pushed,
    PushKind,
    PushResult,
    payload_size,
)
from buffer_service.domain.ops.tasks import (
    Extended,
    LeaseAsk,
    Leased,
    LeaseGrant,
    LeaseReturn,
    LeaseState,
    LeaseWait,
    NewTask,
    Returned,
    ReturnKind,
    ReturnOutcome,
    Submit,
    Submitted,
)
from buffer_service.domain.ops.views import Amount, Record, RunView, StoreFacts, TaskFailure
from buffer_service.domain.ops.weights import (
    EngineReport,
    EngineReported,
    PlanCollective,
    Publish,
    Published,
    TrainerClock,
    WeightsView,
    WeightVersion,
)

__all__ = [
    "PORTION",
    "Amount",
    "Batch",
    "Buffer",
    "EngineReport",
    "EngineReported",
    "Extended",
    "GroupFacts",
    "LeaseAsk",
    "LeaseGrant",
    "LeaseReturn",
    "LeaseState",
    "LeaseWait",
    "Leased",
    "NewGroup",
    "NewTask",
    "PlanCollective",
    "Publish",
    "Published",
    "Pull",
    "PushKind",
    "PushResult",
    "Pushed",
    "Record",
    "Resume",
    "ResumeMode",
    "Resumed",
    "ReturnKind",
    "ReturnOutcome",
    "Returned",
    "RunView",
    "ShardGroup",
    "Short",
    "StoreFacts",
    "Submit",
    "Submitted",
    "TaskFailure",
    "TrainerClock",
    "WeightVersion",
    "WeightsView",
    "payload_size",
]
