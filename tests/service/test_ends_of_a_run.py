"""Runs that are held, drained, continued and deleted, while others wait for them."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from buffer_wire.revision import Revision
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.support.processes import children
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure, make_group, make_task, streamed
from tests.support.service import ServiceProcess

QUEUED = groups_pb2.PUSH_OUTCOME_QUEUED
SOON_S = 0.9
"""Shorter than the second after which a waiter looks again without being told."""


def pause(run: RunRpc) -> Revision:
    return Revision.of(run.rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S))


def drain(run: RunRpc) -> Revision:
    return Revision.of(run.rpc.runs.DrainRun(runs_pb2.DrainRunRequest(run=run.ref), timeout=TIMEOUT_S))


def go_on(run: RunRpc) -> Revision:
    return Revision.of(run.rpc.runs.ContinueRun(runs_pb2.ContinueRunRequest(run=run.ref), timeout=TIMEOUT_S))


def delete(run: RunRpc) -> None:
    run.rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)


def open_rpcs(service: ServiceProcess, method: str, count: int) -> None:
    service.until_metric(count, "rollout_buffer_open_rpcs", method=method)


# ── held ─────────────────────────────────────────────────────────────────────


def test_a_held_run_begins_nothing_and_lets_everything_land(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=4)
    run.submit([make_task("a"), make_task("b")])
    lease = run.lease().leases[0]
    run.fill(1)
    run.pull(0)
    run.fill(1, prefix="y")
    revision = pause(run)
    assert run.get().paused == "operator"
    assert pause(run) == revision, "again, and nothing changes"
    assert failure(lambda: run.submit([make_task()])).attributes["why"] == "operator"
    assert run.lease().wait == tasks_pb2.LEASE_WAIT_PAUSED
    assert failure(lambda: run.pull(1)).attributes["why"] == "operator"
    assert run.pull(0)[0].replayed
    assert run.push_one(make_group("a", lease_id=lease.lease_id)).outcome == QUEUED
    assert run.publish(1, commit_through_step=0).committed_steps == 1
    assert run.checkpoint(0).checkpointed_steps == 1
    assert go_on(run) > revision
    assert run.get().paused == ""
    assert run.pull(1)[0].total_groups == 1
    assert [lease.task.task_id for lease in run.lease().leases] == ["b"]


def test_a_resume_does_not_undo_an_operators_hold(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    pause(run)
    run.resume()
    assert run.get().paused == "operator"


@pytest.mark.parametrize(
    ("act", "wait"), [(pause, tasks_pb2.LEASE_WAIT_PAUSED), (drain, tasks_pb2.LEASE_WAIT_DRAINING)]
)
def test_workers_that_wait_are_told_at_once(
    service: ServiceProcess, rpc: Rpc, act: Callable[[RunRpc], int], wait: int
) -> None:
    run = rpc.create()
    with ThreadPoolExecutor() as pool:
        waiting = []
        for i in range(3):
            request = run.lease_request(wait_ms=20_000, worker_id=f"w{i}")
            waiting.append(pool.submit(rpc.tasks.LeaseTasks, request, timeout=TIMEOUT_S))
            open_rpcs(service, "LeaseTasks", i + 1)
        started = time.monotonic()
        act(run)
        assert [future.result(TIMEOUT_S).wait for future in waiting] == [wait] * 3
    assert time.monotonic() - started < SOON_S


def test_a_worker_that_comes_to_a_held_run_waits_and_gets_work_when_it_goes_on(
    service: ServiceProcess, rpc: Rpc
) -> None:
    run = rpc.create()
    run.submit([make_task("a")])
    pause(run)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(rpc.tasks.LeaseTasks, run.lease_request(wait_ms=20_000), timeout=TIMEOUT_S)
        open_rpcs(service, "LeaseTasks", 1)
        time.sleep(0.2)
        assert not waiting.done(), "it must not ask again and again"
        started = time.monotonic()
        go_on(run)
        assert [lease.task.task_id for lease in waiting.result(TIMEOUT_S).leases] == ["a"]
    assert time.monotonic() - started < SOON_S


def test_a_pull_that_waits_is_refused_when_the_run_is_held(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failure, lambda: run.pull(0, wait_ms=20_000))
        open_rpcs(service, "PullBatch", 1)
        started = time.monotonic()
        pause(run)
        error = waiting.result(TIMEOUT_S)
    assert time.monotonic() - started < SOON_S
    assert (error.reason, error.attributes["why"]) == ("run_paused", "operator")


def test_a_watch_hears_of_a_hold(rpc: Rpc) -> None:
    run = rpc.create()
    watch = streamed(rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S))
    assert not next(watch).paused
    pause(run)
    assert next(watch).paused
    watch.cancel()


# ── drained ──────────────────────────────────────────────────────────────────


def test_a_drained_run_trains_what_it_has_and_ends(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=4)
    run.submit([make_task("a"), make_task("b"), make_task("c")])
    leases = run.lease(max_tasks=2).leases
    run.fill(1)
    drain(run)
    state = run.get()
    assert state.draining
    assert state.paused == ""
    assert failure(lambda: run.submit([make_task()])).attributes["why"] == "draining"
    assert run.lease(wait_ms=100).wait == tasks_pb2.LEASE_WAIT_DRAINING
    error = failure(lambda: run.pull(0))
    assert error.reason == "batch_not_ready"
    assert error.attributes["waits_on"] == (
        "generation: 2 tasks are being generated, the last ones of a run that is being drained"
    )
    for lease in leases:
        run.push_one(make_group(lease.task.task_id, lease_id=lease.lease_id))
    assert run.pull(0)[0].total_groups == 2
    error = failure(lambda: run.pull(1, wait_ms=20_000))
    assert (error.reason, error.attributes["why"]) == ("run_paused", "drained")
    go_on(run)
    assert [lease.task.task_id for lease in run.lease().leases] == ["c"]


def test_a_pull_that_waits_ends_when_the_last_lease_of_a_drained_run_does(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    drain(run)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failure, lambda: run.pull(0, wait_ms=20_000))
        open_rpcs(service, "PullBatch", 1)
        request = tasks_pb2.ReturnLeasesRequest(
            run=run.ref,
            worker_id=run.worker_id,
            instance_id=run.instance_id,
            returns=[tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED)],
        )
        rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
        assert waiting.result(TIMEOUT_S).attributes["why"] == "drained"


# ── deleted ──────────────────────────────────────────────────────────────────


def test_a_deleted_run_is_gone_for_everybody_and_its_name_is_free(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=4)
    run.submit([make_task("a")])
    run.fill(3)
    run.pull(0)
    delete(run)
    assert run.run_id not in rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids
    calls: list[Callable[[], object]] = [
        run.get,
        lambda: run.submit([make_task()]),
        run.lease,
        lambda: run.push([make_group("x")]),
        lambda: run.pull(0),
        lambda: run.commit(0),
        run.resume,
        lambda: delete(run),
        lambda: pause(run),
        lambda: drain(run),
        lambda: go_on(run),
        lambda: list(rpc.runs.ExportRecords(runs_pb2.ExportRecordsRequest(run=run.ref), timeout=TIMEOUT_S)),
    ]
    assert [failure(call).reason for call in calls] == ["unknown_run"] * len(calls)
    request = runs_pb2.CreateRunRequest(run_id=run.run_id, policy=runs_pb2.RunPolicy(batch_groups=2))
    again = rpc.runs.CreateRun(request, timeout=TIMEOUT_S)
    assert again.created
    assert again.run.groups.accepted.groups == 0
    assert again.run.next_step == 0


def test_whoever_waits_for_a_run_that_is_deleted_is_told(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, overflow_action=runs_pb2.OVERFLOW_ACTION_BLOCK)
    puller = RunRpc(rpc, run.run_id)
    with ThreadPoolExecutor() as pool:
        lease = pool.submit(failure, lambda: run.lease(wait_ms=20_000))
        pull = pool.submit(failure, lambda: puller.pull(0, wait_ms=20_000))
        open_rpcs(service, "LeaseTasks", 1)
        open_rpcs(service, "PullBatch", 1)
        delete(run)
        assert [waiting.result(TIMEOUT_S).reason for waiting in (lease, pull)] == ["unknown_run"] * 2


def test_a_blocked_push_of_a_run_that_is_deleted_ends_and_the_service_goes_on(
    service: ServiceProcess, rpc: Rpc
) -> None:
    run = rpc.create(batch_groups=2, overflow_action=runs_pb2.OVERFLOW_ACTION_BLOCK)
    run.fill(2)
    with ThreadPoolExecutor() as pool:
        push = pool.submit(failure, lambda: run.push([make_group("late")]))
        service.until_metric(1, "rollout_buffer_blocked_pushes")
        processes = children(service.pid)
        delete(run)
        assert push.result(TIMEOUT_S).reason == "unknown_run"
    other = rpc.create(batch_groups=1)
    other.fill(1)
    assert other.pull(0)[0].total_groups == 1
    assert children(service.pid) == processes


def test_a_run_that_is_not_there_cannot_be_acted_on(rpc: Rpc) -> None:
    nobody = RunRpc(rpc, "nobody")
    for act in (pause, drain, go_on, delete):
        assert failure(lambda act=act: act(nobody)).reason == "unknown_run"  # type: ignore[misc]
    malformed = RunRpc(rpc, "-")
    for act in (pause, drain, go_on, delete):
        assert failure(lambda act=act: act(malformed)).attributes["field"] == "run.run_id"  # type: ignore[misc]


def test_the_revision_of_an_act_is_one_to_send_back(rpc: Rpc) -> None:
    run = rpc.create()
    before = Revision.of(run.submit([make_task()]))
    for act in (pause, drain, go_on):
        after = act(run)
        assert after > before
        before = after
    ref = common_pb2.RunRef(run_id=run.run_id, seen_revision=before, seen_proof=before.proof)
    request = run.lease_request()
    request.run.CopyFrom(ref)
    assert rpc.tasks.LeaseTasks(request, timeout=TIMEOUT_S).leases


def test_a_run_of_a_deleted_ones_name_is_not_behind_what_workers_remember(rpc: Rpc) -> None:
    old = rpc.create(batch_groups=1)
    old.fill(1)
    remembered = Revision.of(old.publish(1))
    delete(old)
    policy = runs_pb2.RunPolicy(batch_groups=1)
    created = rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=old.run_id, policy=policy), timeout=TIMEOUT_S)
    assert created.created
    request = old.lease_request()
    request.run.seen_revision, request.run.seen_proof = remembered, remembered.proof
    assert rpc.tasks.LeaseTasks(request, timeout=TIMEOUT_S).wait == tasks_pb2.LEASE_WAIT_NO_TASKS
    assert old.get().paused == ""
