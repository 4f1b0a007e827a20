"""Tests of what a caller can do to a run by what it says it has seen."""

import pytest

from buffer_wire.revision import Revision
from rollout_buffer.v1 import runs_pb2, tasks_pb2
from rollout_workers.service.client import ServiceClient
from rollout_workers.versions import Version
from tests.support.claims import proven
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure, make_group, make_task
from tests.support.service import ServiceProcess


def heartbeat(run: RunRpc, seen: int, proof: str = "") -> object:
    """A worker's call that claims a revision."""
    request = tasks_pb2.ExtendLeasesRequest(run=run.ref, worker_id="w", instance_id="i", lease_ids=["a/0/1"])
    request.run.seen_revision, request.run.seen_proof = seen, proof
    return run.rpc.tasks.ExtendLeases(request, timeout=TIMEOUT_S)


def trains(run: RunRpc) -> bool:
    """True when a group comes in and goes out."""
    run.push([make_group("x")])
    return [item.group.header.task_id for item in run.pull(run.get().next_step)[1]] == ["x"]


@pytest.mark.parametrize("proof", ["", "0" * 16])
@pytest.mark.parametrize("ahead", [1, 1_000, None])
def test_a_claim_that_nobody_made_for_the_caller_pauses_nothing(rpc: Rpc, ahead: int | None, proof: str) -> None:
    run = rpc.create(batch_groups=1)
    revision = run.submit([make_task()]).revision
    seen = 2**53 - 1 if ahead is None else revision + ahead
    error = failure(lambda: heartbeat(run, seen, proof))
    assert (error.reason, error.code) == ("unproven_revision", "FAILED_PRECONDITION")
    assert error.attributes == {"run_id": run.run_id, "seen_revision": str(seen), "revision": str(revision)}
    assert run.get().paused == ""
    assert run.resume().revision == revision + 1
    assert trains(run)


def test_a_proof_is_good_for_its_own_revision_and_run(rpc: Rpc, service: ServiceProcess) -> None:
    run, other = rpc.create(), rpc.create()
    revision = Revision.of(run.submit([make_task()]))
    assert revision == proven(service, run.run_id, revision)
    assert revision.proof == proven(service, run.run_id, revision).proof
    for proof in (revision.proof, proven(service, other.run_id, revision + 1).proof):
        assert failure(lambda proof=proof: heartbeat(run, revision + 1, proof)).reason == "unproven_revision"  # type: ignore[misc]
    error = failure(lambda: heartbeat(run, revision + 1, proven(service, run.run_id, revision + 1).proof))
    assert error.reason == "store_rolled_back"
    assert run.get().paused == "store_rolled_back"
    assert run.resume().revision == revision + 2


async def test_a_worker_that_outlives_its_run_works_for_the_next_one_of_the_name(
    rpc: Rpc, service: ServiceProcess
) -> None:
    """Whatever it remembers: revisions begin with the time, but clocks go back."""
    run = rpc.create(batch_groups=1)
    worker = ServiceClient(service.address, run.run_id, instance_id="i", timeout_s=10)
    run.submit([make_task("a")])
    await worker.lease("e", "r1", Version(1, 0), max_tasks=1, wait_s=0)
    old = worker.revisions.seen(run.run_id)
    far = proven(service, run.run_id, old + 3_600_000_000)
    worker.revisions.note(run.run_id, far)
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)
    rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run.run_id), timeout=TIMEOUT_S)
    run.cursor = 0
    run.submit([make_task("b")])
    leased = await worker.lease("e", "r2", Version(1, 0), max_tasks=1, wait_s=0)
    assert [lease.task.task_id for lease in leased.leases] == ["b"]
    assert old < worker.revisions.seen(run.run_id) < far
    assert run.get().paused == ""
    await worker.close()
