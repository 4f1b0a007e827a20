"""A worker of a real service whose engine takes its weights by broadcast only, and generates only under published ones.

The engine is one of `tests.trainer_client.fleet`; groups are `arrays_for` their tasks.
"""

import threading
import time
from types import TracebackType
from typing import Self

import grpc

from buffer_wire.connection.channel import client_options
from rollout_buffer.v1 import common_pb2, groups_pb2, weights_pb2, weights_pb2_grpc
from tests.support.push import Pusher, group_of_lease
from tests.trainer_client.fleet import FleetEngine
from trainer_client.publish.collective.plan import CollectivePlan, Phase, PlanMember, TensorSpec
from trainer_client.state import WeightVersion

REPORT_EVERY_S = 0.05
STOP_S = 20.0
_PHASES: dict[int, Phase] = {
    weights_pb2.PLAN_PHASE_PREPARE: "prepare",
    weights_pb2.PLAN_PHASE_BROADCAST: "broadcast",
    weights_pb2.PLAN_PHASE_ABANDONED: "abandoned",
}


def plan_of_wire(wire: weights_pb2.CollectivePlan) -> CollectivePlan:
    """The plan that the trainer announced."""
    return CollectivePlan(
        version=WeightVersion(wire.version.term, wire.version.version),
        phase=_PHASES[wire.phase],
        membership=wire.membership,
        master_address=wire.master_address,
        master_port=wire.master_port,
        group_name=wire.group_name,
        backend="gloo",
        world_size=wire.world_size,
        members=tuple(PlanMember(member.engine_id, member.rank) for member in wire.members),
        tensors=tuple(TensorSpec(spec.name, spec.dtype, tuple(spec.shape)) for spec in wire.tensors),
        timeout_ms=wire.timeout_ms,
    )


class BroadcastWorker:
    """Works until the block ends; then its engine counts as stopped. `engine` is taken as one that has just started."""

    def __init__(self, target: str, run_id: str, engine: FleetEngine, *, most_groups: int = 1 << 30) -> None:
        engine.loaded, engine.report = WeightVersion(1, 0), {**engine.report, "membership": 0, "prepared": None}
        engine.received.clear()
        self.engine = engine
        self._most_groups = most_groups
        """Number of groups it pushes in all."""
        self._run_id = run_id
        self._channel = grpc.insecure_channel(target, client_options())
        self._weights = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._pusher = Pusher(target, run_id, worker_id=f"worker-{engine.engine_id}")
        self._published: WeightVersion | None = None
        self._stopped = threading.Event()
        self._watch: grpc.Call | None = None
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._follow, self._report_often, self._generate)
        ]

    @property
    def serves(self) -> bool:
        """True when the engine holds what is published: the weights of the start are version 0."""
        return self._published is not None and self.engine.loaded.version == self._published.version

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._watch is not None:
            self._watch.cancel()  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        self._report(weights_pb2.ENGINE_STATE_STOPPED)
        self._pusher.close()
        self._channel.close()
        if error is None and self._failure is not None:
            raise self._failure

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised again when the block ends
            if not self._stopped.is_set():
                self._failure = error

    def _follow(self) -> None:
        request = weights_pb2.WatchWeightsRequest(run=common_pb2.RunRef(run_id=self._run_id))
        self._watch = self._weights.WatchWeights(request)
        seen = b""
        for reply in self._watch:
            self._published = WeightVersion(reply.published.term, reply.published.version)
            plan = reply.plan.SerializeToString() if reply.HasField("plan") else b""
            if plan and plan != seen:
                self.engine.see(plan_of_wire(reply.plan))
            seen = plan

    def _report_often(self) -> None:
        while not self._stopped.wait(REPORT_EVERY_S):
            is_taking_part = self.engine.report["prepared"] is not None
            ready = self.serves and not is_taking_part
            self._report(weights_pb2.ENGINE_STATE_READY if ready else weights_pb2.ENGINE_STATE_LOADING)

    def _report(self, state: "weights_pb2.EngineState.ValueType") -> None:
        shown, loaded = self.engine.report, self.engine.loaded
        message = weights_pb2.EngineReport(
            engine_id=self.engine.engine_id,
            worker_id=f"worker-{self.engine.engine_id}",
            state=state,
            loaded=common_pb2.WeightVersion(term=loaded.term, version=loaded.version),
            membership=shown["membership"],
            errors=shown["errors"],
            last_error=shown["last_error"],
        )
        if (prepared := shown["prepared"]) is not None:
            message.prepared.CopyFrom(common_pb2.WeightVersion(term=prepared.term, version=prepared.version))
        request = weights_pb2.ReportEngineRequest(run=common_pb2.RunRef(run_id=self._run_id), report=message)
        self._weights.ReportEngine(request, timeout=10)

    def _generate(self) -> None:
        pushed = 0
        while not self._stopped.wait(0.02):
            if not self.serves or pushed == self._most_groups:
                continue
            reply = self._pusher.lease(max_tasks=min(2, self._most_groups - pushed), wait_ms=200)
            for lease in reply.leases:
                (outcome,) = self._pusher.push(group_of_lease(lease, reply.published))
                assert outcome == groups_pb2.PUSH_OUTCOME_QUEUED, outcome
                pushed += 1
