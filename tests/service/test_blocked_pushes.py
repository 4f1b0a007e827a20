"""Pushes into a full queue under overflow action `block`: they wait, keep their order, and leave nothing behind."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

import pytest

from buffer_service.rpc.streams.push import WINDOW
from rollout_buffer.v1 import groups_pb2, runs_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect, failure, make_group, make_task, streamed
from tests.support.service import ServiceProcess, running_service

QUEUED = groups_pb2.PUSH_OUTCOME_QUEUED
BLOCK = runs_pb2.OVERFLOW_ACTION_BLOCK


def blocked(service: ServiceProcess, count: int) -> None:
    """Wait until `count` pushes wait for room."""
    service.until_metric(count, "rollout_buffer_blocked_pushes")


class Pusher:
    """A push stream in the background; `acked` receives the group ids of each acknowledged bundle."""

    def __init__(self, run: RunRpc) -> None:
        self.acked: Queue[list[str]] = Queue()
        self.error: Queue[Exception] = Queue()
        self._requests: Queue[groups_pb2.PushGroupsRequest | None] = Queue()
        self._run = run
        self._sequence = 0
        self.call = streamed(run.rpc.groups.PushGroups(self._sent(), timeout=TIMEOUT_S))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, *task_ids: str, lease_id: str = "", tokens: int = 6) -> None:
        """One bundle."""
        self._sequence += 1
        groups = [make_group(task_id, lease_id=lease_id, lengths=(tokens,)) for task_id in task_ids]
        self._requests.put(groups_pb2.PushGroupsRequest(run=self._run.ref, sequence=self._sequence, groups=groups))

    def close(self) -> None:
        """Half-close, and wait until the service has ended the stream."""
        self._requests.put(None)
        self._reader.join(TIMEOUT_S)
        assert not self._reader.is_alive()

    def cancel(self) -> None:
        self.call.cancel()
        self._requests.put(None)
        self._reader.join(TIMEOUT_S)

    def _sent(self) -> Iterator[groups_pb2.PushGroupsRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for reply in self.call:
                assert all(ack.outcome == QUEUED for ack in reply.acks)
                self.acked.put([ack.group_id.removesuffix("/0") for ack in reply.acks])
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error.put(error)


def pulled(run: RunRpc, step: int) -> list[str]:
    return [item.group.header.task_id for item in run.pull(step, wait_ms=10_000)[1]]


@pytest.fixture
def run(rpc: Rpc) -> RunRpc:
    return rpc.create(batch_groups=2, overflow_action=BLOCK)


def test_a_blocked_push_goes_on_as_soon_as_a_batch_is_pulled(service: ServiceProcess, run: RunRpc) -> None:
    pusher = Pusher(run)
    pusher.send("a", "b")
    assert pusher.acked.get(timeout=TIMEOUT_S) == ["a", "b"]
    pusher.send("c", "d")
    blocked(service, 1)
    assert pusher.acked.empty()
    assert run.get().groups.accepted.groups == 2
    started = time.monotonic()
    assert pulled(run, 0) == ["a", "b"]
    assert pusher.acked.get(timeout=TIMEOUT_S) == ["c", "d"]
    assert time.monotonic() - started < 0.9
    assert pulled(run, 1) == ["c", "d"]
    pusher.close()


def test_bundles_and_groups_keep_their_order_through_a_full_queue(run: RunRpc) -> None:
    pusher = Pusher(run)
    names = [f"g{i:02}" for i in range(20)]
    for i in range(0, 20, 5):
        pusher.send(*names[i : i + 5])
    assert [name for step in range(10) for name in pulled(run, step)] == names
    assert [pusher.acked.get(timeout=TIMEOUT_S) for _ in range(4)] == [names[i : i + 5] for i in range(0, 20, 5)]
    pusher.close()
    assert run.get().groups.balanced


def test_streams_are_served_in_the_order_in_which_they_were_blocked(service: ServiceProcess, run: RunRpc) -> None:
    run.fill(2)
    pushers = [Pusher(run) for _ in range(4)]
    for i, pusher in enumerate(pushers):
        pusher.send(f"p{i}")
        blocked(service, i + 1)
    assert pulled(run, 0) == ["x0", "x1"]
    assert pulled(run, 1) == ["p0", "p1"]
    assert pulled(run, 2) == ["p2", "p3"]
    for pusher in pushers:
        pusher.close()


def test_a_push_that_is_given_up_leaves_its_place_and_its_payload(
    service: ServiceProcess, run: RunRpc, rpc: Rpc
) -> None:
    run.fill(2)
    first, second = Pusher(run), Pusher(run)
    first.send("first")
    blocked(service, 1)
    second.send("second", "third")
    blocked(service, 2)
    first.cancel()
    blocked(service, 1)
    assert pulled(run, 0) == ["x0", "x1"]
    assert second.acked.get(timeout=TIMEOUT_S) == ["second", "third"]
    assert run.get().groups.accepted.groups == 4
    second.close()


def test_a_unary_push_waits_until_its_deadline(run: RunRpc) -> None:
    run.fill(2)
    request = groups_pb2.PushGroupRequest(run=run.ref, group=make_group("late"))
    started = time.monotonic()
    error = failure(lambda: run.rpc.groups.PushGroup(request, timeout=0.5))
    assert error.attributes["status"] == "DEADLINE_EXCEEDED"
    assert time.monotonic() - started >= 0.5
    assert run.get().groups.accepted.groups == 2
    assert pulled(run, 0) == ["x0", "x1"]
    assert run.push_one(make_group("late")).outcome == QUEUED


def test_the_lease_of_a_blocked_push_stays_live(rpc: Rpc) -> None:
    # Several tries fit into its time even on a slow machine.
    run = rpc.create(batch_groups=1, overflow_action=BLOCK, lease_ttl_ms=3_000)
    run.submit([make_task("leased")])
    lease_id = run.lease().leases[0].lease_id
    run.fill(1)
    pusher = Pusher(run)
    pusher.send("leased", lease_id=lease_id)
    time.sleep(4.5)
    state = run.get()
    assert (state.tasks.leased, state.statistics.leases_expired) == (1, 0)
    assert pulled(run, 0) == ["x0"]
    assert pusher.acked.get(timeout=TIMEOUT_S) == ["leased"]
    pusher.close()


def test_a_blocked_push_goes_on_when_the_policy_gives_way(service: ServiceProcess, run: RunRpc, rpc: Rpc) -> None:
    run.fill(2)
    pusher = Pusher(run)
    pusher.send("a")
    blocked(service, 1)
    assert pusher.acked.empty()
    policy = runs_pb2.RunPolicy(batch_groups=2, overflow_action=runs_pb2.OVERFLOW_ACTION_DROP_OLDEST)
    rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref, policy=policy), timeout=TIMEOUT_S)
    assert pusher.acked.get(timeout=TIMEOUT_S) == ["a"]
    assert run.get().groups.dropped_overflow.groups == 1
    pusher.close()


def test_a_stream_is_not_read_further_than_its_window_while_it_is_blocked(service: ServiceProcess, run: RunRpc) -> None:
    run.fill(2)
    read_before = service.metric("rollout_buffer_rpc_received_bytes_total", method="PushGroups")
    pusher = Pusher(run)
    for i in range(30):
        pusher.send(f"g{i:02}", tokens=40_000)
    bundle_bytes = groups_pb2.PushGroupsRequest(
        run=run.ref, sequence=1, groups=[make_group("g00", lengths=(40_000,))]
    ).ByteSize()
    window = read_before + WINDOW * bundle_bytes
    service.until_metric(window, "rollout_buffer_rpc_received_bytes_total", method="PushGroups")
    blocked(service, 1)
    time.sleep(0.3)
    assert service.metric("rollout_buffer_rpc_received_bytes_total", method="PushGroups") == window
    pusher.cancel()


def test_unary_pushes_that_wait_count_against_the_bytes_of_a_process(tmp_path: Path) -> None:
    with running_service(tmp_path, rpc_processes=1, blocked_bytes=1 << 20) as own:
        client = connect(own.address)
        run = client.create(batch_groups=2, overflow_action=BLOCK)
        run.fill(2)
        groups = [make_group(f"u{number}", lengths=(100_000,)) for number in range(4)]
        assert 2 * groups[0].ByteSize() > 1 << 20 > groups[0].ByteSize()
        with ThreadPoolExecutor(len(groups)) as pool:
            pushes = [pool.submit(run.push_one, group) for group in groups]
            refused = [push for _, push in zip(groups[1:], as_completed(pushes, timeout=TIMEOUT_S), strict=False)]
            errors = [failure(push.result) for push in refused]
            assert [error.reason for error in errors] == ["not_ready"] * 3
            assert all(error.retryable and "blocked_bytes" in error.message for error in errors)
            (waiting,) = set(pushes) - set(refused)
            assert len(pulled(run, 0)) == 2
            assert waiting.result(TIMEOUT_S).outcome == QUEUED
        assert run.push_one(groups[pushes.index(refused[0])]).outcome == QUEUED, "there is room again"
        client.channel.close()
