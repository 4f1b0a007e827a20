"""A real gRPC server that answers as a test tells it to: no rules, no store."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import Message

from buffer_wire.codec import Delivered, join_group, join_pull
from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import Revision
from buffer_wire.status import status_of
from rollout_buffer.v1 import batches_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.support.push import GroupArrays
from trainer_client import ClientOptions

OPTIONS = ClientOptions(timeout_s=10, attempt_timeout_s=5)

Do = Callable[..., Any]
"""do(method, *args, **kwargs): the method's result, of either client."""

Answer: TypeAlias = Message | Sequence[bytes] | RolloutBufferError | Callable[[Any, grpc.ServicerContext], Any]

_METHODS: dict[str, type[Message]] = {
    "RunService/CreateRun": runs_pb2.CreateRunRequest,
    "RunService/GetRun": runs_pb2.GetRunRequest,
    "RunService/ListRuns": runs_pb2.ListRunsRequest,
    "RunService/UpdatePolicy": runs_pb2.UpdatePolicyRequest,
    "RunService/PauseRun": runs_pb2.PauseRunRequest,
    "RunService/DrainRun": runs_pb2.DrainRunRequest,
    "RunService/ContinueRun": runs_pb2.ContinueRunRequest,
    "RunService/DeleteRun": runs_pb2.DeleteRunRequest,
    "TaskService/SubmitTasks": tasks_pb2.SubmitTasksRequest,
    "BatchService/Commit": batches_pb2.CommitRequest,
    "BatchService/Checkpoint": batches_pb2.CheckpointRequest,
    "BatchService/Resume": batches_pb2.ResumeRequest,
    "BatchService/PullBatch": batches_pb2.PullBatchRequest,
    "WeightService/Publish": weights_pb2.PublishRequest,
    "WeightService/PlanCollective": weights_pb2.PlanCollectiveRequest,
}


class FakeService:
    """Answers each method's calls in turn; the last answer of a method repeats."""

    def __init__(self, port: int = 0) -> None:
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self._answers: dict[str, list[Answer]] = {}
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        for service in ("RunService", "TaskService", "BatchService", "WeightService"):
            handlers = {
                name.partition("/")[2]: self._handler(name, request)
                for name, request in _METHODS.items()
                if name.startswith(service)
            }
            full_name = f"rollout_buffer.v1.{service}"
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full_name, handlers),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.target = f"127.0.0.1:{self.port}"
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, grace_s: float | None = None) -> None:
        self._server.stop(grace_s).wait()

    def answer(self, method: str, *answers: Answer) -> None:
        """Return what "Service/Method" answers from now on."""
        with self._lock:
            self._answers[method] = list(answers)

    def _next(self, method: str, request: Message) -> Answer:
        with self._lock:
            self.requests[method].append(request)
            answers = self._answers[method]
            return answers.pop(0) if len(answers) > 1 else answers[0]

    def _handler(self, method: str, request_type: type[Message]) -> Any:
        def resolve(request: Message, context: grpc.ServicerContext) -> Any:
            answer = self._next(method, request)
            if callable(answer) and not isinstance(answer, Message):
                answer = answer(request, context)
            if isinstance(answer, RolloutBufferError):
                code, details, trailing = status_of(answer)
                context.set_trailing_metadata(trailing)
                context.abort(code, details)
            return answer

        def stream(request: Message, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from resolve(request, context)

        if method.endswith("PullBatch"):
            return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=request_type.FromString)
        return grpc.unary_unary_rpc_method_handler(
            resolve,
            request_deserializer=request_type.FromString,
            response_serializer=lambda reply: reply.SerializeToString(),
        )


PROOF = "proof"


def pull_messages(
    groups: Sequence[GroupArrays],
    *,
    step: int = 0,
    train_version: int = 0,
    revision: int = 1,
    head_version: int = 0,
    tail_version: int = 0,
    a_message: int = 2,
    micro_batch: int = 0,
    final: bool = True,
    earlier: Sequence[GroupArrays] = (),
    replayed: bool = False,
) -> list[bytes]:
    """The messages of a pull of one rank, `a_message` groups in each; `earlier` groups are those of earlier
    micro-batches.
    """
    samples = [sample for group in (*earlier, *groups) for sample in group.samples]
    info = batches_pb2.BatchInfo(
        step=step,
        train_version=train_version,
        total_groups=len(earlier) + len(groups),
        total_samples=len(samples),
        total_tokens=sum(len(sample.token_ids) for sample in samples),
        total_loss_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        total_trajectories=sum(
            len({sample.trajectory or -1 - i for i, sample in enumerate(group.samples) if sample.trainable})
            for group in (*earlier, *groups)
        ),
        shard_groups=len(groups),
        shard_tokens=sum(len(sample.token_ids) for group in groups for sample in group.samples),
        staleness_mean_milli=1500,
        staleness_max=2,
        replayed=replayed,
        micro_batch=micro_batch,
        final=final,
    )
    messages = [batches_pb2.PullBatchResponse(revision=revision, revision_proof=PROOF, batch=info).SerializeToString()]
    delivered = [
        Delivered(b"".join(join_group(*group.to_wire())), sequence + 1, head_version, tail_version)
        for sequence, group in enumerate(groups)
    ]
    messages += [
        join_pull(Revision(revision, PROOF), delivered[i : i + a_message]) for i in range(0, len(delivered), a_message)
    ]
    return messages
