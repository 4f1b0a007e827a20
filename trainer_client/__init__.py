"""Trainer's side of the rollout buffer: tasks in, batches out, weights published.

Needs grpcio, protobuf and numpy. `trainer_client.collate`, `dataset`, `objectives` and some publishers and integrations
use torch, and import it when they are imported.

Imports are lazy, except for the errors. The names below are looked up at their first use (PEP 562). The client imports
sessions, the decoding of groups and estimates (and numpy with it) inside the methods that need them first. Annotations
there are quoted. Such imports count as calls under way (`trainer_client.forks`). A child that is forked in the middle
of an import would wait for it for ever.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from buffer_wire import errors
from buffer_wire.errors import *  # noqa: F403 - all of them may be caught here, and each is named in one place

if TYPE_CHECKING:
    from buffer_wire.estimate import Estimate
    from buffer_wire.status import ServiceUnreachable
    from trainer_client.batch import Batch, BatchInfo, Group, Sample, Turn, VersionSpan
    from trainer_client.client.aio import AsyncBufferClient
    from trainer_client.client.blocking import BufferClient
    from trainer_client.client.driver import ClientOptions
    from trainer_client.client.evaluation.aio import AsyncEvaluation
    from trainer_client.client.evaluation.blocking import Evaluation
    from trainer_client.client.evaluation.calls import EvaluationFailure, EvaluationState
    from trainer_client.client.requests import Submission
    from trainer_client.forks import UsedAfterFork
    from trainer_client.manifest import (
        AdapterManifest,
        CollectiveManifest,
        FilesManifest,
        TensorsManifest,
        WeightFile,
        manifest_of,
    )
    from trainer_client.policy import Environment, Policy
    from trainer_client.progress import ProgressBar
    from trainer_client.publish.publication import Publication, WeightPublisher
    from trainer_client.publish.ranks import PublishFailed
    from trainer_client.selection.facts import GroupFacts
    from trainer_client.selection.selector import SelectionFailed
    from trainer_client.session.plan import SessionOptions
    from trainer_client.session.session import TrainerSession
    from trainer_client.state import (
        Ledger,
        Published,
        Rejected,
        Resumed,
        RunState,
        Submitted,
        TrainerTime,
        WeightVersion,
    )
    from trainer_client.tasks import ImageRef, SamplingParams, Task
    from trainer_client.waiting import Waiting

__all__ = [
    "AdapterManifest",
    "AsyncBufferClient",
    "AsyncEvaluation",
    "Batch",
    "BatchInfo",
    "BufferClient",
    "ClientOptions",
    "CollectiveManifest",
    "Environment",
    "Estimate",
    "Evaluation",
    "EvaluationFailure",
    "EvaluationState",
    "FilesManifest",
    "Group",
    "GroupFacts",
    "ImageRef",
    "Ledger",
    "Policy",
    "ProgressBar",
    "Publication",
    "PublishFailed",
    "Published",
    "Rejected",
    "Resumed",
    "RunState",
    "Sample",
    "SamplingParams",
    "SelectionFailed",
    "ServiceUnreachable",
    "SessionOptions",
    "Submission",
    "Submitted",
    "Task",
    "TensorsManifest",
    "TrainerSession",
    "TrainerTime",
    "Turn",
    "UsedAfterFork",
    "VersionSpan",
    "Waiting",
    "WeightFile",
    "WeightPublisher",
    "WeightVersion",
    "manifest_of",
]
__all__ += errors.__all__

_HOMES = {
    "buffer_wire.estimate": ("Estimate",),
    "buffer_wire.status": ("ServiceUnreachable",),
    "trainer_client.client.aio": ("AsyncBufferClient",),
    "trainer_client.client.evaluation.aio": ("AsyncEvaluation",),
    "trainer_client.batch": ("Batch", "BatchInfo", "Group", "Sample", "Turn", "VersionSpan"),
    "trainer_client.client.blocking": ("BufferClient",),
    "trainer_client.client.driver": ("ClientOptions",),
    "trainer_client.client.evaluation.blocking": ("Evaluation",),
    "trainer_client.client.evaluation.calls": ("EvaluationFailure", "EvaluationState"),
    "trainer_client.forks": ("UsedAfterFork",),
    "trainer_client.manifest": (
        "AdapterManifest",
        "CollectiveManifest",
        "FilesManifest",
        "TensorsManifest",
        "WeightFile",
        "manifest_of",
    ),
    "trainer_client.policy": ("Environment", "Policy"),
    "trainer_client.progress": ("ProgressBar",),
    "trainer_client.publish.publication": ("Publication", "WeightPublisher"),
    "trainer_client.publish.ranks": ("PublishFailed",),
    "trainer_client.selection.facts": ("GroupFacts",),
    "trainer_client.selection.selector": ("SelectionFailed",),
    "trainer_client.client.requests": ("Submission",),
    "trainer_client.session.session": ("TrainerSession",),
    "trainer_client.session.plan": ("SessionOptions",),
    "trainer_client.state": (
        "Ledger",
        "Published",
        "Rejected",
        "Resumed",
        "RunState",
        "Submitted",
        "TrainerTime",
        "WeightVersion",
    ),
    "trainer_client.tasks": ("ImageRef", "SamplingParams", "Task"),
    "trainer_client.waiting": ("Waiting",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # A type checker would take every name for one that there is.

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
