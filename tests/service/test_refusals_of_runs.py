"""Bad requests about runs and policies, and requests to runs that are stopped: each is refused with a reason and the
facts behind it, and nothing is written."""

from typing import TYPE_CHECKING, Any

import pytest

from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.service.refusals import engine_report, refused
from tests.support.claims import proven
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure, make_group, make_task
from tests.support.service import ServiceProcess

if TYPE_CHECKING:
    from collections.abc import Callable


def test_an_unknown_run_is_named_by_every_method(rpc: Rpc) -> None:
    run = RunRpc(rpc, "nobody")
    group = make_group("x")
    calls: list[Callable[[], object]] = [
        run.get,
        lambda: rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref), timeout=TIMEOUT_S),
        lambda: run.submit([make_task()]),
        run.lease,
        lambda: rpc.tasks.ExtendLeases(
            tasks_pb2.ExtendLeasesRequest(run=run.ref, worker_id="w", instance_id="i", lease_ids=["a/0/1"]),
            timeout=TIMEOUT_S,
        ),
        lambda: rpc.tasks.ReturnLeases(
            tasks_pb2.ReturnLeasesRequest(
                run=run.ref,
                worker_id="w",
                instance_id="i",
                returns=[tasks_pb2.LeaseReturn(lease_id="a/0/1", kind=tasks_pb2.RETURN_KIND_INTERRUPTED)],
            ),
            timeout=TIMEOUT_S,
        ),
        lambda: run.push([group]),
        lambda: run.push_one(group),
        lambda: run.pull(0),
        lambda: run.commit(0),
        lambda: run.checkpoint(0),
        run.resume,
        lambda: run.publish(1),
        lambda: list(rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S)),
        lambda: rpc.weights.ReportEngine(
            weights_pb2.ReportEngineRequest(run=run.ref, report=engine_report()), timeout=TIMEOUT_S
        ),
    ]
    for call in calls:
        error = failure(call)
        assert error.reason == "unknown_run"
        assert error.attributes["run_id"] == "nobody"
    assert "nobody" not in rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids


@pytest.mark.parametrize("run_id", ["", "-run", "a b", "x" * 65, "{a}"])
def test_a_malformed_run_id_is_refused(rpc: Rpc, run_id: str) -> None:
    error = failure(lambda: rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run_id), timeout=TIMEOUT_S))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "run_id")


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"batch_groups": 0}, "policy.batch_groups"),
        ({"batch_groups": 65_537}, "policy.batch_groups"),
        ({"max_queued_groups": 0}, "policy.max_queued_groups"),
        ({"max_queued_bytes": 1}, "policy.max_queued_bytes"),
        ({"lease_ttl_ms": 10}, "policy.lease_ttl_ms"),
        ({"max_attempts": 0}, "policy.max_attempts"),
        ({"prefetch_batches": 65}, "policy.prefetch_batches"),
        ({"overflow_action": 9}, "policy.overflow_action"),
        ({"stale_action": 9}, "policy.stale_action"),
    ],
)
def test_a_policy_out_of_bounds_names_its_field(rpc: Rpc, policy: dict[str, Any], field: str) -> None:
    run = rpc.create()
    message = runs_pb2.RunPolicy(**policy)
    refused(
        run,
        lambda: rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref, policy=message), timeout=TIMEOUT_S),
        "invalid_field",
        field=field,
    )
    error = failure(
        lambda: rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id="refused", policy=message), timeout=TIMEOUT_S)
    )
    assert error.attributes["field"] == field
    assert "refused" not in rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"batch_groups": 8, "max_queued_groups": 4}, "max_queued_groups"),
        ({"batch_groups": 8, "max_queued_tokens": 4}, "max_queued_tokens"),
        ({"max_staleness": 0, "prefetch_batches": 1}, "max_staleness"),
        ({"max_lookahead": 0, "batches_per_publish": 1, "prefetch_batches": 2}, "max_lookahead"),
    ],
)
def test_a_policy_that_could_not_progress_is_refused(rpc: Rpc, policy: dict[str, Any], field: str) -> None:
    run = rpc.create()
    request = runs_pb2.UpdatePolicyRequest(run=run.ref, policy=runs_pb2.RunPolicy(**policy))
    refused(run, lambda: rpc.runs.UpdatePolicy(request, timeout=TIMEOUT_S), "invalid_policy", field=field)


def test_a_run_of_another_policy_is_not_taken_for_the_same(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4)
    request = runs_pb2.CreateRunRequest(run_id=run.run_id, policy=runs_pb2.RunPolicy(batch_groups=8))
    error = refused(run, lambda: rpc.runs.CreateRun(request, timeout=TIMEOUT_S), "run_exists", run_id=run.run_id)
    assert "batch_groups" in error.attributes["differs"]


# ── runs that are stopped ────────────────────────────────────────────────────


def test_a_store_behind_what_was_acknowledged_pauses_the_run_until_it_is_resumed(
    rpc: Rpc, service: ServiceProcess
) -> None:
    run = rpc.create(batch_groups=1)
    acknowledged = proven(service, run.run_id, run.submit([make_task()]).revision + 1_000)
    ahead = common_pb2.RunRef(run_id=run.run_id, seen_revision=acknowledged, seen_proof=acknowledged.proof)
    request = batches_pb2.CommitRequest(run=ahead, term=1, through_step=0)
    error = failure(lambda: rpc.batches.Commit(request, timeout=TIMEOUT_S))
    assert (error.reason, error.attributes["seen_revision"]) == ("store_rolled_back", str(acknowledged))
    assert run.get().paused == "store_rolled_back"
    for call in (lambda: run.submit([make_task()]), lambda: run.push([make_group("x")]), lambda: run.pull(0)):
        paused = refused(run, call, "run_paused")
        assert "store_rolled_back" in paused.attributes["why"]
    assert run.lease().wait == tasks_pb2.LEASE_WAIT_PAUSED
    assert run.resume().term == 2
    assert run.submit([make_task()]).revision > acknowledged


def test_too_many_failed_tasks_stop_the_trainer_with_the_last_error(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_attempts=1, failure_budget=0)
    run.submit([make_task("a"), make_task("b")])
    lease_id = run.lease().leases[0].lease_id
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref,
        worker_id=run.worker_id,
        instance_id=run.instance_id,
        returns=[tasks_pb2.LeaseReturn(lease_id=lease_id, kind=tasks_pb2.RETURN_KIND_FAILED, error="no reward")],
    )
    rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
    refused(run, lambda: run.pull(0), "failure_budget_exceeded", failed="1", budget="0", last_error="no reward")
    assert run.lease().wait == tasks_pb2.LEASE_WAIT_PAUSED
    policy = runs_pb2.RunPolicy(batch_groups=1, max_attempts=1, failure_budget=5)
    rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref, policy=policy), timeout=TIMEOUT_S)
    assert [lease.task.task_id for lease in run.lease().leases] == ["b"]
