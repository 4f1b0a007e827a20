"""A worker of a hundred lines that shares nothing with ours: blocking generated stubs, one engine that makes tokens up,
one group at a time, pushed by the unary call. It follows the protocol.
"""

import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import grpc

from buffer_conformance.played.groups import made_group
from rollout_buffer.v1 import common_pb2, groups_pb2, groups_pb2_grpc, tasks_pb2, tasks_pb2_grpc, weights_pb2
from rollout_buffer.v1 import weights_pb2_grpc as weights_grpc

AGAIN_S = 0.3
NAME, INSTANCE = "plain", uuid.uuid4().hex


class PlainWorker:
    def __init__(self, address: str, run_id: str) -> None:
        channel = grpc.insecure_channel(address)
        self.tasks = tasks_pb2_grpc.TaskServiceStub(channel)
        self.groups = groups_pb2_grpc.GroupServiceStub(channel)
        self.weights = weights_grpc.WeightServiceStub(channel)
        self.run = common_pb2.RunRef(run_id=run_id)
        self.lock = threading.Lock()
        self.loaded = common_pb2.WeightVersion(term=1)
        self.stopping = threading.Event()
        self.held = ""
        self.asked = 0

    def call(self, rpc: Any, request: Any, wanted: Callable[[], bool] = lambda: True) -> Any:
        """The reply; None when it is not wanted any more."""
        while wanted():
            with self.lock:
                request.run.CopyFrom(self.run)
            try:
                reply = rpc(request, timeout=20)
            except grpc.RpcError:
                time.sleep(AGAIN_S)
                continue
            with self.lock:
                if reply.revision > self.run.seen_revision:
                    self.run.seen_revision, self.run.seen_proof = reply.revision, reply.revision_proof
            return reply
        return None

    def report(self, state: "weights_pb2.EngineState.ValueType") -> Any:
        report = weights_pb2.EngineReport(engine_id=NAME, worker_id=NAME, state=state, loaded=self.loaded)
        return self.call(self.weights.ReportEngine, weights_pb2.ReportEngineRequest(report=report))

    def work(self) -> None:
        self.loaded.CopyFrom(self.report(weights_pb2.ENGINE_STATE_READY).published)
        self.report(weights_pb2.ENGINE_STATE_READY)
        threading.Thread(target=self.keep, daemon=True).start()
        while not self.stopping.is_set():
            self.asked += 1
            request = tasks_pb2.LeaseTasksRequest(
                worker_id=NAME, instance_id=INSTANCE, request_id=f"{self.asked}", engine_id=NAME, loaded=self.loaded,
                max_tasks=1, wait_ms=500,
            )  # fmt: skip
            reply = self.call(self.tasks.LeaseTasks, request)
            if reply.published != self.loaded:
                self.loaded.CopyFrom(reply.published)
                self.report(weights_pb2.ENGINE_STATE_READY)
            for lease in reply.leases:
                self.held = lease.lease_id
                group = made_group(lease, reply.published)
                self.call(self.groups.PushGroup, groups_pb2.PushGroupRequest(group=group))
                self.held = ""
            if not reply.leases:
                time.sleep(AGAIN_S)
        self.report(weights_pb2.ENGINE_STATE_STOPPED)

    def keep(self) -> None:
        while True:
            time.sleep(1.0)
            lease_id = self.held
            if lease_id:
                request = tasks_pb2.ExtendLeasesRequest(worker_id=NAME, instance_id=INSTANCE, lease_ids=[lease_id])
                reply = self.call(self.tasks.ExtendLeases, request, lambda: lease_id == self.held)  # noqa: B023 - used here
                if reply is not None and reply.states[0] != tasks_pb2.LEASE_STATE_LIVE:
                    self.held = ""


if __name__ == "__main__":
    worker = PlainWorker(*sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: worker.stopping.set())
    worker.work()
