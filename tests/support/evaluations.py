"""A worker that evaluates, with generated stubs only: it leases, and ends leases as it is told to."""

import threading
import uuid
from typing import Any

import grpc

from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import from_detail
from rollout_buffer.v1 import common_pb2, groups_pb2, groups_pb2_grpc, tasks_pb2, tasks_pb2_grpc
from rollout_buffer.v1.evaluations_pb2_grpc import EvaluationServiceStub
from tests.support.rpc import TIMEOUT_S, VERSION_0, make_group


class EvaluatingWorker:
    """One worker of one run."""

    def __init__(self, channel: grpc.Channel, run_id: str, worker_id: str = "evaluator") -> None:
        self.stub = EvaluationServiceStub(channel)
        self.tasks = tasks_pb2_grpc.TaskServiceStub(channel)
        self.groups = groups_pb2_grpc.GroupServiceStub(channel)
        self.ref = common_pb2.RunRef(run_id=run_id)
        self.worker_id = worker_id
        self.instance_id = "instance-1"

    def lease(
        self, max_tasks: int = 1, wait_ms: int = 0, *, loaded: common_pb2.WeightVersion = VERSION_0, **fields: Any
    ) -> tasks_pb2.LeaseTasksResponse:
        values: dict[str, Any] = {"request_id": uuid.uuid4().hex, "engine_id": "engine-0", **fields}
        request = tasks_pb2.LeaseTasksRequest(
            run=self.ref,
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            loaded=loaded,
            max_tasks=max_tasks,
            wait_ms=wait_ms,
            sink=tasks_pb2.TASK_SINK_EVALUATIONS,
            **values,
        )
        return self.tasks.LeaseTasks(request, timeout=TIMEOUT_S + wait_ms / 1000)

    def push(
        self,
        lease: tasks_pb2.Lease,
        group: groups_pb2.Group | None = None,
        *,
        version: common_pb2.WeightVersion | None = None,
    ) -> groups_pb2.PushAck:
        """End a lease with a group of `version` (None: the right one)."""
        lengths, task = [4] * lease.task.group_size, lease.task.task_id
        made = group or make_group(task, lengths=lengths, version=version or lease.pinned)
        made.header.lease_id = lease.lease_id
        request = groups_pb2.PushGroupRequest(run=self.ref, group=made)
        return self.groups.PushGroup(request, timeout=TIMEOUT_S).ack

    def finish(self, lease: tasks_pb2.Lease) -> int:
        """End a lease with the right group; what became of it."""
        return self.push(lease).outcome

    def refusal(
        self,
        lease: tasks_pb2.Lease,
        group: groups_pb2.Group | None = None,
        *,
        version: common_pb2.WeightVersion | None = None,
    ) -> RolloutBufferError:
        """The error with which a group is refused."""
        ack = self.push(lease, group, version=version)
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID
        return from_detail(ack.error)

    def hand_back(self, lease: tasks_pb2.Lease, error: str = "") -> int:
        """End a lease without a group: interrupted, or failed with an error."""
        kind = tasks_pb2.RETURN_KIND_FAILED if error else tasks_pb2.RETURN_KIND_INTERRUPTED
        request = tasks_pb2.ReturnLeasesRequest(
            run=self.ref,
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            returns=[tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=kind, error=error)],
        )
        return self.tasks.ReturnLeases(request, timeout=TIMEOUT_S).outcomes[0]

    def work(self, count: int, *, loaded: common_pb2.WeightVersion = VERSION_0) -> threading.Thread:
        """Finish this many tasks, one after another, in a thread of its own."""

        def run() -> None:
            for _ in range(count):
                for lease in self.lease(1, wait_ms=10_000, loaded=loaded).leases:
                    self.finish(lease)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread
