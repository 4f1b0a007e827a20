"""Evaluations over gRPC: waits, refusals, what a result has to be, and that training sees nothing of them."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from buffer_wire.errors import EvaluationExists, InvalidField, StaleTerm, UnknownEvaluation, UnknownLease
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2, tasks_pb2, weights_pb2
from rollout_buffer.v1 import evaluations_pb2 as pb
from tests.support.evaluations import EvaluatingWorker
from tests.support.rpc import TIMEOUT_S, VERSION_0, Rpc, RunRpc, failure, make_group, make_task
from tests.support.service import ServiceProcess


@pytest.fixture
def run(rpc: Rpc) -> RunRpc:
    return rpc.create(batch_groups=2)


@pytest.fixture
def worker(rpc: Rpc, run: RunRpc) -> EvaluatingWorker:
    return EvaluatingWorker(rpc.channel, run.run_id)


def submit_request(run: RunRpc, name: str, tasks: list[tasks_pb2.Task], **fields: object) -> pb.SubmitEvaluationRequest:
    values: dict[str, Any] = {"term": run.term, **fields}
    return pb.SubmitEvaluationRequest(run=run.ref, eval_id=name, tasks=tasks, **values)


def submit(
    worker: EvaluatingWorker, run: RunRpc, name: str = "e", count: int = 2, **fields: object
) -> pb.SubmitEvaluationResponse:
    tasks = [make_task() for _ in range(count)]
    return worker.stub.SubmitEvaluation(submit_request(run, name, tasks, **fields), timeout=TIMEOUT_S)


def get(worker: EvaluatingWorker, name: str = "e") -> pb.Evaluation:
    return worker.stub.GetEvaluation(
        pb.GetEvaluationRequest(run=worker.ref, eval_id=name), timeout=TIMEOUT_S
    ).evaluation


def read(worker: EvaluatingWorker, *, seen: int = 0, wait_ms: int = 0) -> list[pb.ReadEvaluationResponse]:
    request = pb.ReadEvaluationRequest(run=worker.ref, eval_id="e", seen=seen, wait_ms=wait_ms)
    return list(worker.stub.ReadEvaluation(request, timeout=TIMEOUT_S + wait_ms / 1000))


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_results_are_read_in_order_of_their_ending_and_the_ledgers_know_nothing(
    run: RunRpc, worker: EvaluatingWorker
) -> None:
    before = run.get()
    assert submit(worker, run, count=3).created
    first, second, third = worker.lease(5).leases
    assert [lease.task.task_id for lease in (first, second, third)] == ["e.0", "e.1", "e.2"]
    assert worker.finish(second) == groups_pb2.PUSH_OUTCOME_RECORDED
    assert worker.finish(second) == groups_pb2.PUSH_OUTCOME_DUPLICATE
    assert worker.finish(first) == groups_pb2.PUSH_OUTCOME_RECORDED
    messages = read(worker)
    results = [result for message in messages for result in message.results]
    assert [(result.task_index, result.task_id) for result in results] == [(1, "e.1"), (0, "e.0")]
    assert results[0].group == make_group("e.1", lease_id=second.lease_id, lengths=[4, 4], version=first.pinned)
    assert [result.task_index for message in read(worker, seen=1) for result in message.results] == [0]
    view = get(worker)
    assert (view.pending, view.leased, view.finished, view.failed) == (0, 1, 2, 0)
    after = run.get()
    assert (after.groups, after.tasks, after.statistics) == (before.groups, before.tasks, before.statistics)
    assert worker.hand_back(third) == tasks_pb2.RETURN_OUTCOME_PENDING


def test_a_task_is_given_to_no_engine_of_another_version(run: RunRpc, worker: EvaluatingWorker) -> None:
    submit(worker, run)
    files = weights_pb2.FilesManifest(
        base_url="/weights/1", files=[weights_pb2.WeightFile(name="w", size_bytes=1, sha256=bytes(32))]
    )
    run.publish(1, manifest=weights_pb2.WeightManifest(files=files))
    newer = common_pb2.WeightVersion(term=1, version=1)
    reply = worker.lease(1, loaded=newer)
    assert (list(reply.leases), reply.wait) == ([], tasks_pb2.LEASE_WAIT_ENGINE_STALE)
    assert not reply.HasField("wanted")
    assert worker.lease(1, loaded=newer, would_load=True).wanted == tasks_pb2.WantedWeights(version=VERSION_0)
    assert submit(worker, run, "newest", 1).evaluation.version == newer
    (lease,) = worker.lease(5, loaded=newer).leases
    assert lease.task.task_id == "newest.0"
    assert len(worker.lease(5).leases) == 2
    worker.hand_back(lease)
    assert worker.lease(1, would_load=True).wanted.manifest.files == files


def test_a_lease_request_waits_for_a_submit(run: RunRpc, worker: EvaluatingWorker) -> None:
    waiting, replies = in_thread(lambda: worker.lease(1, wait_ms=15_000))
    began = time.monotonic()
    submit(worker, run, count=1)
    waiting.join(15)
    assert [len(reply.leases) for reply in replies] == [1]  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5


def test_a_reader_waits_for_the_end(run: RunRpc, worker: EvaluatingWorker) -> None:
    submit(worker, run, count=1)
    (lease,) = worker.lease().leases
    waiting, replies = in_thread(lambda: read(worker, wait_ms=15_000))
    began = time.monotonic()
    worker.finish(lease)
    waiting.join(15)
    assert time.monotonic() - began < 5
    (messages,) = replies
    assert [len(message.results) for message in messages] == [1, 0]  # type: ignore[attr-defined]
    assert messages[-1].evaluation.finished == 1  # type: ignore[index]


def test_a_group_with_tokens_of_other_weights_is_refused(run: RunRpc, worker: EvaluatingWorker) -> None:
    submit(worker, run, count=1)
    (lease,) = worker.lease().leases
    error = worker.refusal(lease, version=common_pb2.WeightVersion(term=1, version=1))
    assert isinstance(error, InvalidField)
    assert error.attributes["field"] == "samples.spans.version"
    assert worker.refusal(lease, make_group("e.0", lengths=[4])).attributes["field"] == "samples"
    assert worker.refusal(lease, make_group("other", lengths=[4, 4])).attributes["field"] == "task_id"
    assert worker.finish(lease) == groups_pb2.PUSH_OUTCOME_RECORDED


def test_a_partial_rollout_of_an_evaluations_task_is_not_kept_and_holds_up_no_return(
    run: RunRpc, worker: EvaluatingWorker
) -> None:
    submit(worker, run, count=1)
    (lease,) = worker.lease().leases
    made = make_group(lease.task.task_id, lengths=[4, 4], lease_id=lease.lease_id, version=lease.pinned)
    back = tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED, partial_rollout=made)
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref, worker_id=worker.worker_id, instance_id=worker.instance_id, returns=[back]
    )
    assert worker.tasks.ReturnLeases(request, timeout=TIMEOUT_S).outcomes == [tasks_pb2.RETURN_OUTCOME_PENDING]
    (again,) = worker.lease().leases
    assert (again.task, again.attempt) == (lease.task, 2)
    assert not again.HasField("partial_rollout")
    assert worker.finish(again) == groups_pb2.PUSH_OUTCOME_RECORDED


def test_a_task_fails_after_five_errors_and_the_reader_hears_why(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, retry_backoff_ms=1)
    worker = EvaluatingWorker(rpc.channel, run.run_id)
    submit(worker, run, count=1)
    outcomes = [worker.hand_back(worker.lease(1, wait_ms=10_000).leases[0], f"error {i}") for i in range(5)]
    assert outcomes == [tasks_pb2.RETURN_OUTCOME_PENDING] * 4 + [tasks_pb2.RETURN_OUTCOME_FAILED]
    (message, last) = read(worker)
    assert [(result.error, result.attempts, result.HasField("group")) for result in message.results] == [
        ("error 4", 5, False)
    ]
    assert [failed.error for failed in last.evaluation.failures] == ["error 4"]
    assert run.get().paused == ""


def test_evaluation_goes_on_while_the_run_drains_and_not_while_it_is_paused(
    run: RunRpc, worker: EvaluatingWorker
) -> None:
    submit(worker, run, count=2)
    control = run.rpc.runs
    control.DrainRun(runs_pb2.DrainRunRequest(run=run.ref), timeout=TIMEOUT_S)
    assert len(worker.lease().leases) == 1
    control.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S)
    assert worker.lease(1, wait_ms=10_000).wait == tasks_pb2.LEASE_WAIT_PAUSED
    control.ContinueRun(runs_pb2.ContinueRunRequest(run=run.ref), timeout=TIMEOUT_S)
    assert len(worker.lease().leases) == 1


def test_a_repeated_submit_is_the_same_evaluation_and_another_content_a_conflict(
    run: RunRpc, worker: EvaluatingWorker
) -> None:
    assert submit(worker, run).created
    run.publish(1)
    again = submit(worker, run)
    assert (again.created, again.evaluation.version) == (False, VERSION_0)
    assert isinstance(failure(lambda: submit(worker, run, count=3)), EvaluationExists)
    assert isinstance(failure(lambda: submit(worker, run, "f", term=7)), StaleTerm)
    error = failure(lambda: submit(worker, run, "f", version=9))
    assert error.attributes["field"] == "version"
    error = failure(
        lambda: worker.stub.SubmitEvaluation(submit_request(run, "f", [make_task("x"), make_task("x")]), timeout=9)
    )
    assert error.attributes["field"] == "tasks[1]"


def test_a_deleted_evaluation_is_gone_for_everybody(run: RunRpc, worker: EvaluatingWorker) -> None:
    submit(worker, run)
    (lease,) = worker.lease().leases
    listed = worker.stub.ListEvaluations(pb.ListEvaluationsRequest(run=run.ref), timeout=TIMEOUT_S)
    assert [evaluation.eval_id for evaluation in listed.evaluations] == ["e"]
    worker.stub.DeleteEvaluation(pb.DeleteEvaluationRequest(run=run.ref, eval_id="e"), timeout=TIMEOUT_S)
    request = tasks_pb2.ExtendLeasesRequest(
        run=run.ref, worker_id=worker.worker_id, instance_id=worker.instance_id, lease_ids=[lease.lease_id]
    )
    assert list(worker.tasks.ExtendLeases(request, timeout=TIMEOUT_S).states) == [tasks_pb2.LEASE_STATE_LOST]
    assert worker.finish(lease) == groups_pb2.PUSH_OUTCOME_CLOSED
    assert isinstance(failure(lambda: read(worker)), UnknownEvaluation)
    lease.lease_id = "no lease@"
    assert isinstance(worker.refusal(lease), UnknownLease)
    # One of the same name is another one: what is left of the deleted one does not touch it.
    lease.lease_id = "e@1.0/0/1"
    submit(worker, run)
    assert worker.finish(lease) == groups_pb2.PUSH_OUTCOME_CLOSED
    assert get(worker).pending == 2


def test_evaluations_are_in_the_metrics(service: ServiceProcess, run: RunRpc, worker: EvaluatingWorker) -> None:
    outcomes = ("accepted", "duplicate", "pending")
    before = [ended(service, outcome) for outcome in outcomes]
    pushed = service.metric("rollout_buffer_pushed_groups_total", outcome="duplicate")
    submit(worker, run, count=3)
    lease, other = worker.lease(2).leases
    worker.finish(lease)
    worker.finish(lease)
    worker.hand_back(other)
    assert [ended(service, outcome) - then for outcome, then in zip(outcomes, before, strict=True)] == [1, 1, 1]
    assert service.metric("rollout_buffer_pushed_groups_total", outcome="duplicate") == pushed
    labels = {"run": run.run_id}
    assert service.metric("rollout_buffer_evaluations", **labels) == 1
    assert service.metric("rollout_buffer_evaluation_tasks", **labels, state="pending") == 2
    assert service.metric("rollout_buffer_evaluation_tasks", **labels, state="finished") == 1
    assert service.metric("rollout_buffer_evaluation_stored_bytes", **labels) > 0


def ended(service: ServiceProcess, outcome: str) -> float:
    """Leases of evaluations that ended so."""
    return service.metric("rollout_buffer_evaluation_leases_ended_total", outcome=outcome)
