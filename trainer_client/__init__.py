"""The trainer's side of the rollout buffer: tasks in, batches out, weights published.

Needs grpcio, protobuf and numpy. torch is used by `trainer_client.collate`, `dataset`, `objectives` and some
publishers and integrations, and imported when they are.
"""

from buffer_wire.estimate import Estimate
from trainer_client.aio import AsyncBufferClient
from trainer_client.aio_evaluating import AsyncEvaluation
from trainer_client.batch import Batch, BatchInfo, Group, Sample, Turn, VersionSpan
from trainer_client.client import BufferClient
from trainer_client.driver import ClientOptions
from trainer_client.evaluating import Evaluation
from trainer_client.evaluations import EvaluationFailure, EvaluationState
from trainer_client.forks import UsedAfterFork
from trainer_client.manifest import CollectiveManifest, FilesManifest, TensorsManifest, WeightFile, manifest_of
from trainer_client.policy import Environment, Policy
from trainer_client.progress import ProgressBar
from trainer_client.publication import Publication, WeightPublisher
from trainer_client.requests import Submission
from trainer_client.session import TrainerSession
from trainer_client.session_plan import SessionOptions
from trainer_client.state import Ledger, Published, Resumed, RunState, Submitted, TrainerTime, WeightVersion
from trainer_client.tasks import SamplingParams, Task
from trainer_client.waiting import Waiting

__all__ = [
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
    "Ledger",
    "Policy",
    "ProgressBar",
    "Publication",
    "Published",
    "Resumed",
    "RunState",
    "Sample",
    "SamplingParams",
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
