"""Long polls: they wake at once, serve first come first served, and say on whom they wait when their time is up."""

import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from rollout_buffer.v1 import batches_pb2, groups_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.support.rpc import (
    TIMEOUT_S,
    VERSION_0,
    Rpc,
    RunRpc,
    failure,
    failure_of,
    make_group,
    make_task,
    streamed,
    version,
)
from tests.support.service import ServiceProcess

SOON_S = 0.9
"""Shorter than the second after which a waiter looks again without being told."""


def open_rpcs(service: ServiceProcess, method: str, count: int) -> None:
    """Wait until `count` RPCs of the method are in progress."""
    service.until_metric(count, "rollout_buffer_open_rpcs", method=method)


def test_a_lease_request_is_answered_as_soon_as_there_is_a_task(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create()
    request = run.lease_request(max_tasks=4, wait_ms=20_000)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(rpc.tasks.LeaseTasks, request, timeout=TIMEOUT_S)
        open_rpcs(service, "LeaseTasks", 1)
        assert not waiting.done()
        started = time.monotonic()
        run.submit([make_task("a")])
        leased = waiting.result(TIMEOUT_S)
    assert time.monotonic() - started < SOON_S
    assert [lease.task.task_id for lease in leased.leases] == ["a"]


def test_lease_requests_are_served_first_come_first_served(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create()
    with ThreadPoolExecutor() as pool:
        waiting: list[Future[Any]] = []
        for i in range(4):
            request = run.lease_request(wait_ms=20_000, worker_id=f"w{i}")
            waiting.append(pool.submit(rpc.tasks.LeaseTasks, request, timeout=TIMEOUT_S))
            open_rpcs(service, "LeaseTasks", i + 1)
        run.submit([make_task(f"t{i}") for i in range(4)])
        leased = [future.result(TIMEOUT_S).leases[0].task.task_id for future in waiting]
    assert leased == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("policy", "tasks", "leased", "wait"),
    [
        ({}, 0, 0, tasks_pb2.LEASE_WAIT_NO_TASKS),
        ({"max_inflight_groups": 1}, 3, 1, tasks_pb2.LEASE_WAIT_AT_CAPACITY),
    ],
)
def test_a_lease_request_that_waits_in_vain_says_why(
    rpc: Rpc, policy: dict[str, Any], tasks: int, leased: int, wait: int
) -> None:
    run = rpc.create(**policy)
    if tasks:
        run.submit([make_task() for _ in range(tasks)])
    assert len(run.lease(max_tasks=leased or 1).leases) == leased
    started = time.monotonic()
    reply = run.lease(wait_ms=300)
    assert 0.25 < time.monotonic() - started < 5
    assert (len(reply.leases), reply.wait) == (0, wait)


def test_an_engine_that_is_too_old_or_quarantined_is_told_at_once(rpc: Rpc) -> None:
    run = rpc.create(max_staleness=1)
    run.submit([make_task()])
    run.publish(5)
    started = time.monotonic()
    stale = run.lease(wait_ms=20_000)
    assert (stale.wait, stale.required_version) == (tasks_pb2.LEASE_WAIT_ENGINE_STALE, 4)
    report = weights_pb2.EngineReport(
        engine_id="engine-0", worker_id="worker", state=weights_pb2.ENGINE_STATE_QUARANTINED, loaded=VERSION_0
    )
    rpc.weights.ReportEngine(weights_pb2.ReportEngineRequest(run=run.ref, report=report), timeout=TIMEOUT_S)
    assert run.lease(wait_ms=20_000).wait == tasks_pb2.LEASE_WAIT_QUARANTINED
    assert time.monotonic() - started < 10


def test_a_restarted_worker_is_not_kept_waiting_behind_its_own_old_leases(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(max_inflight_groups=1)
    run.submit([make_task("a")])
    run.lease()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(
            rpc.tasks.LeaseTasks, run.lease_request(wait_ms=20_000, worker_id="other"), timeout=TIMEOUT_S
        )
        open_rpcs(service, "LeaseTasks", 1)
        run.instance_id = "instance-2"
        reply = run.lease(wait_ms=20_000)
        assert [lease.lease_id for lease in reply.leases] == ["a/0/2"]
        other.cancel()
        run.submit([make_task("b")])
        acks = run.push([make_group("a", lease_id="a/0/2")])
        assert acks[0].outcome == groups_pb2.PUSH_OUTCOME_QUEUED
        assert other.result(TIMEOUT_S).leases[0].task.task_id == "b"


def test_a_pull_is_answered_as_soon_as_its_batch_is_there(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=3)
    run.fill(2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run.pull, 0, 20_000)
        open_rpcs(service, "PullBatch", 1)
        assert not waiting.done()
        started = time.monotonic()
        run.fill(1, prefix="y")
        batch, delivered = waiting.result(TIMEOUT_S)
    assert time.monotonic() - started < SOON_S
    assert len(delivered) == 3
    assert batch.waited_ms > 0


def test_every_waiting_rank_gets_its_shard(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=8)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(run.pull, 0, 20_000, rank=rank, world_size=4) for rank in range(4)]
        open_rpcs(service, "PullBatch", 4)
        run.fill(8)
        shards = [future.result(TIMEOUT_S) for future in waiting]
    ids = [item.group.header.task_id for _, delivered in shards for item in delivered]
    assert sorted(ids) == sorted(f"x{i}" for i in range(8))


def test_pulls_that_wait_are_counted_by_their_run_as_long_as_there_is_one(service: ServiceProcess, rpc: Rpc) -> None:
    waited, deleted = rpc.create(batch_groups=4), rpc.create(batch_groups=4)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(waited.pull, 0, 20_000, rank=rank, world_size=2) for rank in range(2)]
        other = pool.submit(failure, lambda: deleted.pull(0, 20_000))
        service.until_metric(2, "rollout_buffer_waiting_pulls", run=waited.run_id)
        service.until_metric(1, "rollout_buffer_waiting_pulls", run=deleted.run_id)
        waited.fill(4)
        for future in ranks:
            future.result(TIMEOUT_S)
        service.until_metric(0, "rollout_buffer_waiting_pulls", run=waited.run_id)
        rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=deleted.ref), timeout=TIMEOUT_S)
        assert other.result(TIMEOUT_S).reason == "unknown_run"
    assert failure(lambda: RunRpc(rpc, "never-was").pull(0, 20_000)).reason == "unknown_run"
    with urllib.request.urlopen(f"{service.admin}/metrics", timeout=TIMEOUT_S) as answer:
        said = answer.read().decode()
    assert waited.run_id in said
    assert deleted.run_id not in said
    assert "never-was" not in said


def test_a_pull_whose_time_is_up_says_what_is_short_and_on_whom_it_waits(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4)
    run.fill(1)
    error = failure(lambda: run.pull(0, wait_ms=200))
    assert error.reason == "batch_not_ready"
    assert error.retryable
    assert (error.attributes["queued_groups"], error.attributes["needed_groups"]) == ("1", "4")
    assert error.attributes["waits_on"] == "the feeder: no task is pending"
    run.submit([make_task("a"), make_task("b")])
    assert failure(lambda: run.pull(0)).attributes["waits_on"].startswith("workers: ")
    run.lease(max_tasks=2)
    error = failure(lambda: run.pull(0))
    assert error.attributes["waits_on"] == "generation: 2 tasks are being generated"
    assert (error.attributes["leased"], error.attributes["pending"]) == ("2", "0")


def test_a_pull_waiting_for_engines_that_are_too_old_says_so(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_staleness=1)
    run.submit([make_task()])
    report = weights_pb2.EngineReport(
        engine_id="e", worker_id="w", state=weights_pb2.ENGINE_STATE_READY, loaded=VERSION_0
    )
    rpc.weights.ReportEngine(weights_pb2.ReportEngineRequest(run=run.ref, report=report), timeout=TIMEOUT_S)
    run.publish(5)
    error = failure(lambda: run.pull(0))
    assert error.attributes["waits_on"] == ("weights: work starts with version 4, and no engine has loaded it: e has 0")


def one_step_off(rpc: Rpc) -> RunRpc:
    """Batches of one group, two of which may exist, with a task to lease."""
    block = runs_pb2.OVERFLOW_ACTION_BLOCK
    run = rpc.create(batch_groups=1, max_queued_groups=2, max_lookahead=1, max_staleness=1, overflow_action=block)
    run.submit([make_task("a")])
    return run


def test_an_engine_that_has_not_loaded_what_is_published_is_told_so_and_leased_to_when_it_has(
    service: ServiceProcess, rpc: Rpc
) -> None:
    run = one_step_off(rpc)
    run.fill(2)
    run.pull(0)
    request = run.lease_request(wait_ms=20_000)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(rpc.tasks.LeaseTasks, request, timeout=TIMEOUT_S)
        open_rpcs(service, "LeaseTasks", 1)
        started = time.monotonic()
        run.publish(1, commit_through_step=0)
        behind = waiting.result(TIMEOUT_S)
    assert time.monotonic() - started < SOON_S
    # Its group would be trained by version 2, behind the one that is queued.
    assert (behind.wait, list(behind.leases)) == (tasks_pb2.LEASE_WAIT_ENGINE_STALE, [])
    assert (behind.required_version, behind.published) == (1, version(1))
    run.report("engine-0", loaded=version(1))
    leased = run.lease(wait_ms=0, loaded=version(1))
    assert [lease.task.task_id for lease in leased.leases] == ["a"]


def test_an_engine_that_never_loads_holds_nobody_up(service: ServiceProcess, rpc: Rpc) -> None:
    run = one_step_off(rpc)
    run.fill(2)
    run.pull(0)
    late = run.lease_request(wait_ms=20_000, worker_id="late", engine_id="late")
    prompt = run.lease_request(wait_ms=20_000, worker_id="prompt", engine_id="prompt", loaded=version(1))
    with ThreadPoolExecutor() as pool:
        answers = []
        for number, request in enumerate((late, prompt), 1):
            answers.append(pool.submit(rpc.tasks.LeaseTasks, request, timeout=TIMEOUT_S))
            open_rpcs(service, "LeaseTasks", number)
        run.publish(1, commit_through_step=0)
        assert answers[0].result(TIMEOUT_S).wait == tasks_pb2.LEASE_WAIT_ENGINE_STALE
        assert [lease.task.task_id for lease in answers[1].result(TIMEOUT_S).leases] == ["a"]
    # What the very next batch needs it may make all the same.
    run.pull(1)
    assert run.get().groups.queued.groups == 0
    run.submit([make_task("b")])
    back = tasks_pb2.ReturnLeasesRequest(
        run=run.ref,
        worker_id="prompt",
        instance_id=run.instance_id,
        returns=[tasks_pb2.LeaseReturn(lease_id="a/0/1", kind=tasks_pb2.RETURN_KIND_INTERRUPTED)],
    )
    rpc.tasks.ReturnLeases(back, timeout=TIMEOUT_S)
    run.publish(2, commit_through_step=1)
    leased = run.lease(2, worker_id="late", engine_id="late", loaded=version(1))
    assert ([lease.task.task_id for lease in leased.leases], leased.wait) == (["a"], tasks_pb2.LEASE_WAIT_ENGINE_STALE)


def test_a_pull_that_waits_while_every_engine_is_behind_names_them(rpc: Rpc) -> None:
    run = one_step_off(rpc)
    run.fill(1)
    run.publish(1)
    run.report("e1")
    run.report("e2", weights_pb2.ENGINE_STATE_LOADING)
    assert run.lease(engine_id="e1").wait == tasks_pb2.LEASE_WAIT_ENGINE_STALE
    waits_on = failure(lambda: run.pull(0, batch_groups=2)).attributes["waits_on"]
    assert waits_on == "weights: work starts with version 1, and no engine has loaded it: e1 has 0, e2 has 0"
    run.report("e1", loaded=version(1))
    assert len(run.lease(engine_id="e1", loaded=version(1)).leases) == 1


def test_a_watch_hears_of_a_publish_at_once(rpc: Rpc) -> None:
    run = rpc.create()
    watches = [
        streamed(rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S))
        for _ in range(3)
    ]
    assert [next(watch).published.version for watch in watches] == [0, 0, 0]
    started = time.monotonic()
    run.publish(1)
    assert [next(watch).published.version for watch in watches] == [1, 1, 1]
    assert time.monotonic() - started < SOON_S
    for watch in watches:
        watch.cancel()


def test_a_watch_hears_of_a_resume(rpc: Rpc) -> None:
    run = rpc.create()
    watch = streamed(rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S))
    assert next(watch).published.term == 1
    run.resume()
    assert next(watch).published.term == 2
    watch.cancel()


def test_a_cancelled_wait_leaves_the_line_to_the_next(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    first = streamed(rpc.batches.PullBatch(run.pull_request(0, wait_ms=20_000), timeout=TIMEOUT_S))
    open_rpcs(service, "PullBatch", 1)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(run.pull, 0, 20_000)
        open_rpcs(service, "PullBatch", 2)
        first.cancel()
        started = time.monotonic()
        run.fill(1)
        assert second.result(TIMEOUT_S)[0].total_groups == 1
    assert time.monotonic() - started < SOON_S
    with pytest.raises(grpc.RpcError) as error:
        next(first)
    assert error.value.code() == grpc.StatusCode.CANCELLED
    assert failure_of(error.value).reason == "internal"


def test_a_pull_that_waits_is_refused_when_another_trainer_resumes(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    zombie = RunRpc(rpc, run.run_id)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failure, lambda: zombie.pull(0, 20_000))
        open_rpcs(service, "PullBatch", 1)
        run.resume()
        assert waiting.result(TIMEOUT_S).reason == "stale_term"


def test_a_replayed_batch_is_there_without_waiting(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.fill(1)
    run.pull(0)
    assert isinstance(run.pull(0, wait_ms=20_000)[0], batches_pb2.BatchInfo)
