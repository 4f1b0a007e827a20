"""Payloads that are gone from the store while their index lives: settled as lost, and the pull repeated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_buffer.v1 import groups_pb2, runs_pb2
from tests.support.rpc import Rpc, RunRpc, connect, failure, make_group, make_task
from tests.support.service import running_service
from tests.support.store_server import StoreServer, store_server


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture
def rpc(store: StoreServer, tmp_path: Path) -> Iterator[Rpc]:
    # Payloads kept by the service would hide their loss from the store.
    with running_service(tmp_path, store=store.url, recent_bytes=0) as service:
        client = connect(service.address)
        yield client
        client.channel.close()


def lose(store: StoreServer, *bodies: groups_pb2.Group) -> None:
    """Delete the payloads that are these groups."""
    wanted = {body.SerializeToString() for body in bodies}
    client: Any = redis.Redis(unix_socket_path=str(store.socket))
    lost = [key for key in client.scan_iter(count=1_000, _type="string") if client.get(key) in wanted]
    assert len(lost) == len(bodies)
    client.delete(*lost)
    client.close()


def names(run: RunRpc, step: int) -> list[str]:
    return [item.group.header.task_id for item in run.pull(step)[1]]


def test_a_batch_with_lost_payloads_is_pulled_without_them(rpc: Rpc, store: StoreServer) -> None:
    run = rpc.create(batch_groups=4)
    groups = run.fill(4)
    lose(store, groups[1])
    batch, delivered = run.pull(0)
    assert [item.group for item in delivered] == [groups[0], groups[2], groups[3]]
    assert (batch.total_groups, batch.shard_groups, batch.replayed) == (3, 3, True)
    assert batch.total_tokens == sum(s.tokens for item in delivered for s in item.group.header.samples)
    state = run.get()
    assert (state.groups.lost.groups, state.groups.delivered.groups) == (1, 3)
    assert state.groups.balanced


def test_the_task_of_a_lost_group_is_started_anew(rpc: Rpc, store: StoreServer) -> None:
    run = rpc.create(batch_groups=1)
    run.submit([make_task("a")])
    group = make_group("a", lease_id=run.lease().leases[0].lease_id)
    run.push([group])
    lose(store, group)
    batch, delivered = run.pull(0)
    assert (batch.total_groups, delivered) == (0, [])
    again = run.lease().leases[0]
    assert (again.task.task_id, again.incarnation) == ("a", 1)


def test_a_loss_found_in_the_middle_of_a_stream_ends_it_for_a_retry(rpc: Rpc, store: StoreServer) -> None:
    run = rpc.create(batch_groups=4)
    groups = [make_group(f"x{i}", lengths=(400_000,), seed=i) for i in range(4)]
    for group in groups:
        run.push([group])
    lose(store, groups[3])
    error = failure(lambda: run.pull(0))
    assert (error.reason, error.retryable) == ("not_ready", True)
    assert "step 0" in error.message
    assert names(run, 0) == ["x0", "x1", "x2"]


def test_a_slow_pull_of_a_deleted_run_takes_nothing_from_the_next_one_of_its_name(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=10)
    groups = [make_group(f"x{i}", lengths=(400_000,), seed=i) for i in range(10)]

    def delivered() -> list[groups_pb2.Group]:
        return [item.group for item in run.pull(0)[1]]

    for group in groups:
        run.push([group])
    slow: Any = rpc.batches.PullBatch(run.pull_request(0), timeout=60)
    assert next(slow).HasField("batch")
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=60)
    rpc.runs.CreateRun(
        runs_pb2.CreateRunRequest(run_id=run.run_id, policy=runs_pb2.RunPolicy(batch_groups=10)), timeout=60
    )
    for group in groups:
        run.push([group])
    assert delivered() == groups
    # Read on, it finds payloads gone that are not the present run's.
    assert failure(lambda: list(slow)).reason == "not_ready"
    assert run.get().groups.lost.groups == 0
    assert delivered() == groups


def test_a_trained_step_with_lost_payloads_cannot_be_pulled_again(rpc: Rpc, store: StoreServer) -> None:
    run = rpc.create(batch_groups=2)
    groups = run.fill(2)
    run.pull(0)
    run.commit(0)
    lose(store, groups[0])
    error = failure(lambda: run.pull(0))
    assert (error.reason, error.retryable) == ("store_fault", False)
    assert "step 0" in error.message
    # What was trained stays so.
    assert run.get().groups.trained.groups == 2
