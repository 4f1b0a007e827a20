"""KEDA's external scaler, as KEDA calls it: what a pool of workers can have in flight."""

from collections.abc import Callable

import grpc
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.keda import externalscaler_pb2 as pb
from rollout_buffer.keda import externalscaler_pb2_grpc
from rollout_buffer.v1 import evaluations_pb2, evaluations_pb2_grpc, runs_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, failure, make_group, make_task, streamed


class Scaler:
    """KEDA's side, for the trigger of one run."""

    def __init__(self, channel: grpc.Channel, **metadata: str) -> None:
        self.stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        self.asked = pb.ScaledObjectRef(name="pool", namespace="rl", scalerMetadata=metadata)

    def active(self) -> bool:
        return self.stub.IsActive(self.asked, timeout=TIMEOUT_S).result

    def wanted(self) -> float:
        request = pb.GetMetricsRequest(scaledObjectRef=self.asked, metricName=self.spec().metricName)
        (value,) = self.stub.GetMetrics(request, timeout=TIMEOUT_S).metricValues
        assert value.metricValue == value.metricValueFloat
        return value.metricValueFloat

    def spec(self) -> pb.MetricSpec:
        (spec,) = self.stub.GetMetricSpec(self.asked, timeout=TIMEOUT_S).metricSpecs
        return spec


@pytest.fixture
def scaler(rpc: Rpc) -> Callable[..., Scaler]:
    return lambda **metadata: Scaler(rpc.channel, **metadata)


def test_pool_of_a_run_that_is_not_there_has_no_work(scaler: Callable[..., Scaler]) -> None:
    pool = scaler(run="tomorrow")
    assert (pool.active(), pool.wanted()) == (False, 0)


def test_what_is_leased_and_what_may_be_leased_counts(rpc: Rpc, scaler: Callable[..., Scaler]) -> None:
    run = rpc.create(batch_groups=2)
    pool = scaler(run=run.run_id)
    assert (pool.active(), pool.wanted()) == (False, 0)
    run.submit([make_task() for _ in range(5)])
    assert (pool.active(), pool.wanted()) == (True, 5)
    lease = run.lease().leases[0]
    assert pool.wanted() == 5
    run.push_one(make_group(lease.task.task_id, lease_id=lease.lease_id))
    assert pool.wanted() == 4


def test_tasks_that_admission_holds_back_ask_for_nobody(rpc: Rpc, scaler: Callable[..., Scaler]) -> None:
    run = rpc.create(batch_groups=2, max_inflight_groups=3)
    run.submit([make_task() for _ in range(5)])
    pool = scaler(run=run.run_id)
    assert pool.wanted() == 3
    run.lease(max_tasks=2)
    assert pool.wanted() == 3
    ahead = rpc.create(batch_groups=2, max_lookahead=0)
    ahead.fill(2)
    ahead.submit([make_task() for _ in range(5)])
    assert (scaler(run=ahead.run_id).active(), scaler(run=ahead.run_id).wanted()) == (False, 0)


def test_tasks_that_limits_of_starts_hold_back_ask_for_one_worker_at_most(
    rpc: Rpc, scaler: Callable[..., Scaler]
) -> None:
    rule = runs_pb2.EnvironmentRule(environment="", starts_per_minute=1, start_burst=3)
    run = rpc.create(batch_groups=2, environments=[rule])
    run.submit([make_task() for _ in range(9)])
    pool = scaler(run=run.run_id)
    assert pool.wanted() == 3
    lease = run.lease(max_tasks=9).leases[0]
    assert pool.wanted() == 3 + 1, "and a worker for the next start"
    run.push_one(make_group(lease.task.task_id, lease_id=lease.lease_id))
    assert pool.wanted() == 2 + 1


def test_paused_or_drained_run_needs_workers_for_its_leases_alone(rpc: Rpc, scaler: Callable[..., Scaler]) -> None:
    for stop in (
        lambda run: rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S),
        lambda run: rpc.runs.DrainRun(runs_pb2.DrainRunRequest(run=run.ref), timeout=TIMEOUT_S),
    ):
        run = rpc.create(batch_groups=2)
        run.submit([make_task() for _ in range(5)])
        run.lease(max_tasks=2)
        stop(run)
        assert scaler(run=run.run_id).wanted() == 2


def test_evaluations_keep_a_pool_up(rpc: Rpc, scaler: Callable[..., Scaler]) -> None:
    run = rpc.create(batch_groups=2)
    run.publish(1)
    evaluations_pb2_grpc.EvaluationServiceStub(rpc.channel).SubmitEvaluation(
        evaluations_pb2.SubmitEvaluationRequest(run=run.ref, term=1, eval_id="e", tasks=[make_task(), make_task()]),
        timeout=TIMEOUT_S,
    )
    assert (scaler(run=run.run_id).active(), scaler(run=run.run_id).wanted()) == (True, 2)
    rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S)
    assert scaler(run=run.run_id).wanted() == 0, "a paused run leases no evaluations"


def test_worth_of_a_pod_is_the_triggers(scaler: Callable[..., Scaler]) -> None:
    assert scaler(run="r").spec().targetSizeFloat == 16
    spec = scaler(run="r", groupsPerWorker="2.5").spec()
    assert (spec.targetSize, spec.targetSizeFloat) == (3, 2.5)
    for wrong in ("0", "many", "nan"):
        assert failure(scaler(run="r", groupsPerWorker=wrong).spec).attributes["field"] == "groupsPerWorker"
    assert isinstance(failure(scaler().active), InvalidField)


def test_stream_tells_changes(rpc: Rpc, scaler: Callable[..., Scaler]) -> None:
    run = rpc.create(batch_groups=2)
    pool = scaler(run=run.run_id)
    stream = streamed(pool.stub.StreamIsActive(pool.asked, timeout=TIMEOUT_S))
    assert next(stream).result is False
    run.submit([make_task()])
    assert next(stream).result is True
    stream.cancel()
