"""The table of rights: which roles may call which RPC, and where a request names its run.

Invariant: a method that is not in the table may be called by nobody while tokens are asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Role of a token: the kind of work that it is for."""

    WORKER = "worker"
    """Leases tasks, pushes groups, follows the weights."""
    TRAINER = "trainer"
    """Creates its runs, feeds, pulls, publishes, evaluates."""
    READER = "reader"
    """Reads everything, metrics and recordings too."""
    ADMIN = "admin"
    """May do everything, deletion and reflection included."""


class RunAt(StrEnum):
    """Place in a request where its run is named."""

    REF = "run.run_id"
    """Reference to a run, which nearly every request has."""
    FIELD = "run_id"
    """Field of the request itself."""
    BYTES = "bytes"
    """Message that the handler parses itself; it checks the caller's rights once it has."""
    NOWHERE = "nowhere"
    """The request is about all runs; the handler leaves out those that the caller may not see."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one RPC: the roles that may call it, and where its request names the run."""

    roles: frozenset[Role]
    run_at: RunAt = RunAt.REF


def _rule(*roles: Role, run_at: RunAt = RunAt.REF) -> Rule:
    return Rule(frozenset({*roles, Role.ADMIN}), run_at)


_WORKER = _rule(Role.WORKER)
_LEASES = _rule(Role.WORKER, Role.TRAINER)
"""Rule of what is done with leases, for trainers too: they lease groups that wait in stages."""
_TRAINER = _rule(Role.TRAINER)
_READ = _rule(Role.TRAINER, Role.READER)
_PUSH = _rule(Role.WORKER, Role.TRAINER, run_at=RunAt.BYTES)
"""Rule of pushes, for trainers too: frameworks that generate by themselves have no worker."""

_CONTRACT: Mapping[str, Mapping[str, Rule]] = {
    "RunService": {
        "CreateRun": _rule(Role.TRAINER, run_at=RunAt.FIELD),
        "GetRun": _rule(Role.WORKER, Role.TRAINER, Role.READER),
        "ListRuns": _rule(Role.TRAINER, Role.READER, run_at=RunAt.NOWHERE),
        "UpdatePolicy": _TRAINER,
        "PauseRun": _TRAINER,
        "DrainRun": _TRAINER,
        "ContinueRun": _TRAINER,
        "DeleteRun": _rule(),
        "ExportRecords": _READ,
    },
    "TaskService": {
        "SubmitTasks": _TRAINER,
        "LeaseTasks": _WORKER,
        "ExtendLeases": _LEASES,
        "Heartbeat": _WORKER,
        "ReturnLeases": _LEASES,
    },
    "StageService": {"LeaseGroups": _TRAINER},
    "GroupService": {"PushGroups": _PUSH, "PushGroup": _PUSH},
    "PayloadService": {
        "GetWriteAccess": _rule(Role.WORKER, Role.TRAINER),
        "GetReadAccess": _TRAINER,
        "WritePayload": _PUSH,
        "ReadPayload": _TRAINER,
        "WriteBlob": _rule(Role.TRAINER, run_at=RunAt.BYTES),
        "ReadBlob": _rule(Role.WORKER, Role.TRAINER),
    },
    "BatchService": {
        # It may commit and checkpoint too, so its roles are those of the two.
        "PullBatch": _rule(Role.TRAINER, run_at=RunAt.BYTES),
        "Reject": _TRAINER,
        "Commit": _TRAINER,
        "Checkpoint": _TRAINER,
        "Resume": _TRAINER,
    },
    "WeightService": {
        "Publish": _TRAINER,
        "WatchWeights": _rule(Role.WORKER, Role.TRAINER, Role.READER),
        "PlanCollective": _TRAINER,
        "ReportEngine": _WORKER,
    },
    "EvaluationService": {
        "SubmitEvaluation": _TRAINER,
        "GetEvaluation": _READ,
        "ReadEvaluation": _READ,
        "ListEvaluations": _READ,
        "DeleteEvaluation": _TRAINER,
    },
    "InspectService": {
        "ListTasks": _READ,
        "GetTask": _READ,
        "ListGroups": _READ,
        "GetGroup": _READ,
        "ListBatches": _READ,
        "GetWaits": _READ,
    },
}

REFLECTION = _rule(run_at=RunAt.NOWHERE)
"""Rule for gRPC's reflection service, and for whatever else is not of the contract; checks of health need no token."""

SCALER_PREFIX = "/externalscaler.ExternalScaler/"
"""Prefix of the methods of KEDA's external scaler."""

SCALER = _rule(Role.WORKER, Role.TRAINER, Role.READER, run_at=RunAt.BYTES)
"""Rule for KEDA's external scaler, whose handlers find token and run in the metadata of its trigger."""

RULES: Mapping[str, Rule] = {
    f"/rollout_buffer.v1.{service}/{method}": rule
    for service, methods in _CONTRACT.items()
    for method, rule in methods.items()
}
"""Rules by the full name of the method."""

PAGE = frozenset({Role.TRAINER, Role.READER, Role.ADMIN})
"""Roles that may see runs on the admin page."""

METRICS = frozenset({Role.READER, Role.ADMIN})
"""Roles that may scrape /metrics."""

OPEN_PATHS = frozenset({"/", "/livez", "/readyz"})
"""Paths of the admin page that need no token: probes have none, and the page at / asks for one."""

PAGE_FILES = "/page/"
"""Prefix of the paths of the files that the page at / loads. They hold no data and are open as well."""
