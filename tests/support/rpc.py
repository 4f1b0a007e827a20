"""A plain protobuf client of the service, with generated stubs only: what any other language's client would do."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from buffer_wire import layout
from buffer_wire.connection.channel import client_options
from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import error_of
from rollout_buffer.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    common_pb2,
    groups_pb2,
    groups_pb2_grpc,
    inspect_pb2_grpc,
    payloads_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

TIMEOUT_S = 20.0
VERSION_0 = common_pb2.WeightVersion(term=1, version=0)


def version(number: int) -> common_pb2.WeightVersion:
    """A weight version of the first term."""
    return common_pb2.WeightVersion(term=1, version=number)


def failure(call: Callable[[], object]) -> RolloutBufferError:
    """The error that `call` fails with, as it travelled in the RPC's trailing metadata."""
    try:
        call()
    except grpc.RpcError as error:
        return failure_of(error)
    raise AssertionError("the RPC did not fail")


def failure_of(error: Any) -> RolloutBufferError:
    """The error that a failed RPC carries."""
    return error_of(error.code(), error.details(), error.trailing_metadata())


def streamed(call: object) -> Any:
    """A streaming call, which the stubs know as an iterable alone: it can also be asked for the next, and cancelled."""
    return call


def make_group(
    task_id: str,
    *,
    lease_id: str = "",
    incarnation: int = 0,
    lengths: Sequence[int] = (4, 6),
    version: common_pb2.WeightVersion = VERSION_0,
    seed: int = 0,
    environment: str = "sums",
    rewards: Sequence[float] = (),
) -> groups_pb2.Group:
    """A valid group with samples of these many tokens, the first of each being the prompt; rewards 0.5 by default."""
    total = sum(lengths)
    random = np.random.default_rng(seed)
    columns: dict[str, layout.Array] = {
        "token_ids": random.integers(0, 1_000, total, np.int32),
        "logprobs": -random.random(total, np.float32),
        "loss_mask": np.ones(total, np.uint8),
    }
    header = groups_pb2.GroupHeader(
        task_id=task_id,
        lease_id=lease_id,
        incarnation=incarnation,
        environment=environment,
        worker_id="w",
        samples=[
            groups_pb2.Sample(
                tokens=n,
                prompt_len=1,
                loss_tokens=n - 1,
                reward=reward,
                finish_reason=groups_pb2.FINISH_REASON_STOP,
                spans=[groups_pb2.VersionSpan(version=version, start=1, end=n)],
            )
            for n, reward in zip(lengths, rewards or [0.5] * len(lengths), strict=True)
        ],
        columns=[layout.column_of(name, array, groups_pb2.AXIS_TOKEN) for name, array in columns.items()],
    )
    return groups_pb2.Group(header=header, payload=layout.write_payload(list(columns.values())))


def make_task(task_id: str = "", **fields: Any) -> tasks_pb2.Task:
    """A valid task."""
    values: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "group_size": 2,
        "sampling": tasks_pb2.SamplingParams(max_new_tokens=16),
        **fields,
    }
    return tasks_pb2.Task(task_id=task_id, **values)


@dataclass(frozen=True)
class Rpc:
    """Stubs of every service on one channel."""

    channel: Any
    """A grpc.Channel; the stubs would not have it make raw calls."""

    @property
    def runs(self) -> runs_pb2_grpc.RunServiceStub:
        return runs_pb2_grpc.RunServiceStub(self.channel)

    @property
    def tasks(self) -> tasks_pb2_grpc.TaskServiceStub:
        return tasks_pb2_grpc.TaskServiceStub(self.channel)

    @property
    def groups(self) -> groups_pb2_grpc.GroupServiceStub:
        return groups_pb2_grpc.GroupServiceStub(self.channel)

    @property
    def batches(self) -> batches_pb2_grpc.BatchServiceStub:
        return batches_pb2_grpc.BatchServiceStub(self.channel)

    @property
    def weights(self) -> weights_pb2_grpc.WeightServiceStub:
        return weights_pb2_grpc.WeightServiceStub(self.channel)

    @property
    def payloads(self) -> payloads_pb2_grpc.PayloadServiceStub:
        return payloads_pb2_grpc.PayloadServiceStub(self.channel)

    @property
    def inspect(self) -> inspect_pb2_grpc.InspectServiceStub:
        return inspect_pb2_grpc.InspectServiceStub(self.channel)

    def create(self, **policy: Any) -> "RunRpc":
        """A new run of a unique name."""
        run_id = f"run-{uuid.uuid4().hex[:12]}"
        self.runs.CreateRun(
            runs_pb2.CreateRunRequest(run_id=run_id, policy=runs_pb2.RunPolicy(**policy)), timeout=TIMEOUT_S
        )
        return RunRpc(self, run_id)


@dataclass
class RunRpc:
    """One run as its trainer and one worker see it."""

    rpc: Rpc
    run_id: str
    term: int = 1
    cursor: int = 0
    worker_id: str = "worker"
    instance_id: str = "instance-1"
    pushed: list[groups_pb2.Group] = field(default_factory=list)

    @property
    def ref(self) -> common_pb2.RunRef:
        return common_pb2.RunRef(run_id=self.run_id)

    def get(self) -> runs_pb2.Run:
        return self.rpc.runs.GetRun(runs_pb2.GetRunRequest(run=self.ref), timeout=TIMEOUT_S).run

    def get_revision(self) -> int:
        return self.rpc.runs.GetRun(runs_pb2.GetRunRequest(run=self.ref), timeout=TIMEOUT_S).revision

    def update_policy(self, **policy: Any) -> None:
        request = runs_pb2.UpdatePolicyRequest(run=self.ref, policy=runs_pb2.RunPolicy(**policy))
        self.rpc.runs.UpdatePolicy(request, timeout=TIMEOUT_S)

    # ── tasks ──

    def submit_request(self, tasks: Sequence[tasks_pb2.Task], **fields: Any) -> tasks_pb2.SubmitTasksRequest:
        values: dict[str, Any] = {
            "run": self.ref,
            "term": self.term,
            "expected_cursor": self.cursor,
            "cursor": self.cursor + len(tasks),
            "request_id": uuid.uuid4().hex,
            "tasks": tasks,
            **fields,
        }
        return tasks_pb2.SubmitTasksRequest(**values)

    def submit(self, tasks: Sequence[tasks_pb2.Task]) -> tasks_pb2.SubmitTasksResponse:
        reply = self.rpc.tasks.SubmitTasks(self.submit_request(tasks), timeout=TIMEOUT_S)
        self.cursor = reply.cursor
        return reply

    def lease_request(self, max_tasks: int = 1, wait_ms: int = 0, **fields: Any) -> tasks_pb2.LeaseTasksRequest:
        values: dict[str, Any] = {
            "run": self.ref,
            "worker_id": self.worker_id,
            "instance_id": self.instance_id,
            "request_id": uuid.uuid4().hex,
            "engine_id": "engine-0",
            "loaded": VERSION_0,
            "max_tasks": max_tasks,
            "wait_ms": wait_ms,
            **fields,
        }
        return tasks_pb2.LeaseTasksRequest(**values)

    def lease(self, max_tasks: int = 1, wait_ms: int = 0, **fields: Any) -> tasks_pb2.LeaseTasksResponse:
        return self.rpc.tasks.LeaseTasks(self.lease_request(max_tasks, wait_ms, **fields), timeout=TIMEOUT_S + 60)

    # ── groups ──

    def push_stream(
        self, bundles: Sequence[Sequence[groups_pb2.Group]], timeout_s: float = TIMEOUT_S
    ) -> list[groups_pb2.PushGroupsResponse]:
        """Push bundles over one stream; the replies in order."""
        return list(self.rpc.groups.PushGroups(self.bundles(bundles), timeout=timeout_s))

    def bundles(self, bundles: Sequence[Sequence[groups_pb2.Group]]) -> Iterator[groups_pb2.PushGroupsRequest]:
        for i, groups in enumerate(bundles):
            yield groups_pb2.PushGroupsRequest(run=self.ref, sequence=i + 1, groups=groups)

    def push(self, groups: Sequence[groups_pb2.Group]) -> list[groups_pb2.PushAck]:
        """Push groups in one bundle; their acknowledgements."""
        (reply,) = self.push_stream([groups])
        return list(reply.acks)

    def push_one(self, group: groups_pb2.Group) -> groups_pb2.PushAck:
        """The unary way."""
        request = groups_pb2.PushGroupRequest(run=self.ref, group=group)
        return self.rpc.groups.PushGroup(request, timeout=TIMEOUT_S).ack

    def fill(self, count: int, prefix: str = "x", **fields: Any) -> list[groups_pb2.Group]:
        """Push `count` groups without leases, all of which must be queued."""
        groups = [make_group(f"{prefix}{i}", seed=i, **fields) for i in range(count)]
        acks = self.push(groups)
        assert [ack.outcome for ack in acks] == [groups_pb2.PUSH_OUTCOME_QUEUED] * count
        return groups

    # ── batches ──

    def pull_request(self, step: int, wait_ms: int = 0, **fields: Any) -> batches_pb2.PullBatchRequest:
        values: dict[str, Any] = {
            "run": self.ref,
            "term": self.term,
            "step": step,
            "rank": 0,
            "world_size": 1,
            "wait_ms": wait_ms,
            **fields,
        }
        return batches_pb2.PullBatchRequest(**values)

    def pull(
        self, step: int, wait_ms: int = 0, **fields: Any
    ) -> tuple[batches_pb2.BatchInfo, list[batches_pb2.DeliveredGroup]]:
        """Facts and groups of one rank's shard."""
        messages = list(self.rpc.batches.PullBatch(self.pull_request(step, wait_ms, **fields), timeout=TIMEOUT_S + 60))
        assert messages[0].HasField("batch")
        return messages[0].batch, [group for message in messages for group in message.groups]

    def commit(self, through: int) -> batches_pb2.CommitResponse:
        request = batches_pb2.CommitRequest(run=self.ref, term=self.term, through_step=through)
        return self.rpc.batches.Commit(request, timeout=TIMEOUT_S)

    def checkpoint(self, through: int) -> batches_pb2.CheckpointResponse:
        request = batches_pb2.CheckpointRequest(run=self.ref, term=self.term, through_step=through)
        return self.rpc.batches.Checkpoint(request, timeout=TIMEOUT_S)

    def resume(self, **fields: Any) -> batches_pb2.ResumeResponse:
        """Take the run over; this object goes on as the new trainer."""
        values: dict[str, Any] = {"request_id": uuid.uuid4().hex, **fields}
        reply = self.rpc.batches.Resume(batches_pb2.ResumeRequest(run=self.ref, **values), timeout=TIMEOUT_S)
        self.term, self.cursor = reply.term, reply.cursor
        return reply

    # ── weights ──

    def publish_request(self, version: int, **fields: Any) -> weights_pb2.PublishRequest:
        return weights_pb2.PublishRequest(run=self.ref, term=self.term, version=version, **fields)

    def publish(self, version: int, **fields: Any) -> weights_pb2.PublishResponse:
        return self.rpc.weights.Publish(self.publish_request(version, **fields), timeout=TIMEOUT_S)

    def announce(self, plan: weights_pb2.CollectivePlan) -> weights_pb2.PlanCollectiveResponse:
        request = weights_pb2.PlanCollectiveRequest(run=self.ref, term=self.term, plan=plan)
        return self.rpc.weights.PlanCollective(request, timeout=TIMEOUT_S)

    def watch(self) -> Any:
        """A watch of the weights; cancel it."""
        return streamed(self.rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=self.ref), timeout=TIMEOUT_S))

    def report(
        self,
        engine_id: str,
        state: int = weights_pb2.ENGINE_STATE_READY,
        *,
        wants_load: bool = False,
        **fields: Any,
    ) -> weights_pb2.ReportEngineResponse:
        values: dict[str, Any] = {"worker_id": self.worker_id, "state": state, "loaded": VERSION_0, **fields}
        report = weights_pb2.EngineReport(engine_id=engine_id, **values)
        request = weights_pb2.ReportEngineRequest(run=self.ref, report=report, wants_load=wants_load)
        return self.rpc.weights.ReportEngine(request, timeout=TIMEOUT_S)


def connect(address: str, *options: tuple[str, int]) -> Rpc:
    """A client with a channel of its own, with further options of it."""
    return Rpc(grpc.insecure_channel(address, [*client_options(), *options]))


def manifest(name: str = "model.safetensors", url: str = "/weights/1") -> weights_pb2.WeightManifest:
    """A valid manifest of one file."""
    file = weights_pb2.WeightFile(name=name, size_bytes=4, sha256=bytes(32))
    return weights_pb2.WeightManifest(files=weights_pb2.FilesManifest(base_url=url, files=[file]))


def mirrored(*mirrors: str) -> weights_pb2.WeightManifest:
    """A manifest that names mirrors."""
    made = manifest()
    made.files.mirrors.extend(mirrors)
    return made


def make_plan(version: int = 1, term: int = 1, **fields: Any) -> weights_pb2.CollectivePlan:
    """A valid plan for one engine."""
    values: dict[str, Any] = {
        "phase": weights_pb2.PLAN_PHASE_PREPARE,
        "membership": 1,
        "master_address": "127.0.0.1",
        "master_port": 29_500,
        "group_name": "run:1",
        "backend": "gloo",
        "world_size": 2,
        "members": [weights_pb2.PlanMember(engine_id="engine-0", rank=1)],
        "tensors": [weights_pb2.TensorSpec(name="model.embed.weight", dtype="bfloat16", shape=[8, 4])],
        "timeout_ms": 10_000,
        **fields,
    }
    return weights_pb2.CollectivePlan(version=common_pb2.WeightVersion(term=term, version=version), **values)
