"""Runs that are made and deleted with something in each place, and workers that come and go under new names."""

import random
import time
from collections.abc import Callable
from typing import Any

from buffer_service.store.keys import index_key
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2, weights_pb2
from tests.support.rpc import Rpc, RunRpc, connect, make_group, make_task, version
from trainer_client import BufferClient

FORGOTTEN_S = 60.0
HOUR_MS = 3_600_000
OF_AN_HOUR = 200
"""Workers that come in an hour."""
POLICY: dict[str, Any] = {
    "batch_groups": 2,
    "max_queued_groups": 8,
    "overflow_action": runs_pb2.OVERFLOW_ACTION_BLOCK,
    "record_groups": True,
    "filter_equal_rewards": True,
    "lease_ttl_ms": 1_000,
    "retry_backoff_ms": 1,
    "max_attempts": 1_000,
}


def make_and_delete(address: str, count: int, tell: Callable[[int], None]) -> None:
    """Make runs, one after the other. Each is deleted with tasks, leases, groups and a batch that are not finished."""
    rpc = connect(address)
    with BufferClient(address) as client:
        for number in range(count):
            _live(rpc, client, f"soak-{number}", staged=bool(number % 2))
            tell(1)
    rpc.channel.close()


def _live(rpc: Rpc, client: BufferClient, run_id: str, *, staged: bool) -> None:
    policy = runs_pb2.RunPolicy(**POLICY, stages=["teacher"] if staged else [])
    rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run_id, policy=policy), timeout=60)
    run = RunRpc(rpc, run_id)
    run.submit([make_task(environment=f"e{i % 3}") for i in range(12)])
    run.report("engine-0")
    leases = run.lease(8).leases
    groups = [
        make_group(
            lease.task.task_id, lease_id=lease.lease_id, environment=lease.task.environment, rewards=(0.0, float(i > 0))
        )
        for i, lease in enumerate(leases[:6])
    ]
    assert groups_pb2.PUSH_OUTCOME_QUEUED in {ack.outcome for ack in run.push(groups)}
    client.write_blob(run_id, run_id.encode())
    if not staged:
        run.pull(0)
        run.publish(1, commit_through_step=0)
        run.pull(1)
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=60)


def come_and_go(address: str, store: Any, run_id: str, count: int, tell: Callable[[int], None]) -> None:
    """Have workers come, one after the other, each with an engine: some end in order, some in the middle of a lease.

    Hours pass by having all been heard of two hours before. After one nothing of them is known.
    """
    rng = random.Random(0)
    first = connect(address)
    first.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run_id, policy=runs_pb2.RunPolicy(**POLICY)), timeout=60)
    trainer = RunRpc(first, run_id)
    step = 0
    for number in range(count):
        rpc = connect(address)
        worker = RunRpc(rpc, run_id, worker_id=f"w{number}", instance_id=f"i{number}")
        if not number % 8:
            trainer.submit([make_task() for _ in range(12)])
        _work(worker, f"e{number}", step, in_order=rng.random() < 0.5)
        rpc.channel.close()
        if trainer.get().groups.queued.groups >= POLICY["batch_groups"]:
            trainer.pull(step, 10_000)
            trainer.publish(step + 1, commit_through_step=step)
            trainer.checkpoint(step)
            step += 1
        tell(1)
        if number % OF_AN_HOUR == OF_AN_HOUR - 1:
            _forget(trainer, store)
    _forget(trainer, store)
    first.channel.close()


def _work(worker: RunRpc, engine_id: str, published: int, *, in_order: bool) -> None:
    watch = worker.watch()
    next(watch)
    worker.report(engine_id, loaded=version(published))
    leases = worker.lease(2, engine_id=engine_id, loaded=version(published)).leases
    for lease in leases[: None if in_order else 1]:
        worker.push_one(
            make_group(
                lease.task.task_id,
                lease_id=lease.lease_id,
                incarnation=lease.incarnation,
                version=common_pb2.WeightVersion(term=1, version=published),
                rewards=(0.0, 1.0),
            )
        )
    if in_order:
        worker.report(engine_id, weights_pb2.ENGINE_STATE_STOPPED, loaded=version(published))
    watch.cancel()


def _forget(run: RunRpc, store: Any) -> None:
    deadline = time.monotonic() + FORGOTTEN_S
    while True:
        names = [index_key(run.run_id, name) for name in ("engines_heard", "workers_heard")]
        for name in names:
            for member, heard in store.zrange(name, 0, -1, withscores=True):
                store.zadd(name, {member: heard - 2 * HOUR_MS}, xx=True)
        known = {name: store.hlen(index_key(run.run_id, name)) for name in ("engines", "workers", "engine_counters")}
        if not any(known.values()):
            return
        assert time.monotonic() < deadline, f"after an hour of silence there are {known}"
        time.sleep(0.5)
