"""Limits of starts over the wire: who waits, for how long, and what of it is shown."""

import time
from typing import Any

from rollout_buffer.v1 import runs_pb2, tasks_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, make_group, make_task

INTERVAL_MS = 200


def limited(rpc: Rpc, *tasks: tasks_pb2.Task, **rule: Any) -> RunRpc:
    """A run in which a task of "code" may begin every INTERVAL_MS."""
    rate = 60_000 // INTERVAL_MS
    rules = [runs_pb2.EnvironmentRule(environment="code", starts_per_minute=rate, **rule)]
    run = rpc.create(batch_groups=1, environments=rules)
    run.submit(list(tasks))
    return run


def test_a_request_is_held_until_the_next_task_may_begin_and_no_longer(rpc: Rpc) -> None:
    run = limited(rpc, *(make_task(f"t{i}", environment="code") for i in range(3)))
    assert len(run.lease(8).leases) == 1
    told = run.lease(8)
    assert (list(told.leases), told.wait) == ([], tasks_pb2.LEASE_WAIT_RATE_LIMITED)
    assert told.limited_environment == "code"
    assert 0 < told.limited_for_ms <= INTERVAL_MS
    began = time.monotonic()
    assert len(run.lease(8, wait_ms=10_000).leases) == 1
    # A waiter that is told nothing looks again after a second at the earliest.
    assert time.monotonic() - began < 0.9


def test_work_of_environments_is_shown(rpc: Rpc) -> None:
    run = limited(rpc, make_task("a", environment="code"), make_task("b", environment="math"))
    leases = {lease.task.task_id: lease for lease in run.lease(8).leases}
    group = make_group("b", lease_id=leases["b"].lease_id)
    group.header.environment = "math"
    group.header.samples[0].failure = "no_answer"
    run.push_one(group)
    returned = tasks_pb2.LeaseReturn(
        lease_id=leases["a"].lease_id, kind=tasks_pb2.RETURN_KIND_FAILED, error="the sandbox is down"
    )
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, returns=[returned]
    )
    run.rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
    code, math = run.get().environment_work
    assert (code.environment, code.starts, code.failed_attempts, code.failed_samples) == ("code", 1, 1, 0)
    assert (math.environment, math.starts, math.failed_attempts, math.failed_samples) == ("math", 1, 0, 1)
    assert code.limited_for_ms <= INTERVAL_MS
