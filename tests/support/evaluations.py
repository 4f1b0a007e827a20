"""A worker that evaluates, with generated stubs only: it leases, and ends leases as it is told to."""

import threading
import uuid
from typing import Any

import grpc

from rollout_buffer.v1 import common_pb2, groups_pb2, tasks_pb2
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_buffer.v1.evaluations_pb2_grpc import EvaluationServiceStub
from tests.support.rpc import TIMEOUT_S, VERSION_0, make_group


class EvaluatingWorker:
    """One worker of one run."""

    def __init__(self, channel: grpc.Channel, run_id: str, worker_id: str = "evaluator") -> None:
        self.stub = EvaluationServiceStub(channel)
        self.ref = common_pb2.RunRef(run_id=run_id)
        self.worker_id = worker_id
        self.instance_id = "instance-1"

    def lease(
        self, max_tasks: int = 1, wait_ms: int = 0, *, loaded: common_pb2.WeightVersion = VERSION_0, **fields: Any
    ) -> pb.LeaseEvaluationResponse:
        values: dict[str, Any] = {"request_id": uuid.uuid4().hex, "engine_id": "engine-0", **fields}
        request = pb.LeaseEvaluationRequest(
            run=self.ref,
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            loaded=loaded,
            max_tasks=max_tasks,
            wait_ms=wait_ms,
            **values,
        )
        return self.stub.LeaseEvaluation(request, timeout=TIMEOUT_S + wait_ms / 1000)

    def finish(
        self,
        lease: pb.EvaluationLease,
        group: groups_pb2.Group | None = None,
        *,
        version: common_pb2.WeightVersion | None = None,
    ) -> int:
        """End a lease with a group of `version` (None: the right one); what became of the task."""
        made = group or make_group(
            lease.task.task_id, lengths=[4] * lease.task.group_size, version=version or lease.version
        )
        return self._end(lease, group=made)

    def hand_back(self, lease: pb.EvaluationLease, error: str = "") -> int:
        """End a lease without a group: interrupted, or failed with an error."""
        kind = tasks_pb2.RETURN_KIND_FAILED if error else tasks_pb2.RETURN_KIND_INTERRUPTED
        return self._end(lease, handed_back=pb.EvaluationReturn(kind=kind, error=error))

    def _end(self, lease: pb.EvaluationLease, **end: Any) -> int:
        request = pb.FinishEvaluationRequest(
            run=self.ref,
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            lease_id=lease.lease_id,
            **end,
        )
        return self.stub.FinishEvaluation(request, timeout=TIMEOUT_S).outcome

    def work(self, count: int, *, loaded: common_pb2.WeightVersion = VERSION_0) -> threading.Thread:
        """Finish this many tasks, one after another, in a thread of its own."""

        def run() -> None:
            for _ in range(count):
                for lease in self.lease(1, wait_ms=10_000, loaded=loaded).leases:
                    self.finish(lease)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread
