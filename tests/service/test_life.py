"""Start, drain, crashes and restarts of the service's processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import groups_pb2, weights_pb2
from tests.support.processes import alive, children, command, descendants, until_gone
from tests.support.rpc import TIMEOUT_S, Rpc, connect, failure, failure_of, make_group, make_task, streamed
from tests.support.service import STOP_TIMEOUT_S, ServiceProcess, running_service
from tests.support.store_server import store_server

pytestmark = pytest.mark.faults

QUEUED = groups_pb2.PUSH_OUTCOME_QUEUED
STARTS_WITHIN_S = 60.0
"""Longest start of processes that were killed, on a busy machine too."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service of the test's own, that it may break; two rpc processes."""
    with running_service(tmp_path, rpc_processes=2) as service:
        yield service


def rpc_pids(service: ServiceProcess) -> list[int]:
    return [pid for pid in children(service.pid) if "buffer_service.app" in command(pid)]


def store_pid(service: ServiceProcess) -> int:
    (pid,) = [pid for pid in children(service.pid) if "buffer_service.app" not in command(pid)]
    return pid


def serve_once(*flags: str) -> subprocess.CompletedProcess[str]:
    """A service that is expected not to start."""
    return subprocess.run(
        [sys.executable, "-m", "buffer_cli", "serve", *flags], capture_output=True, text=True, timeout=60, check=False
    )


def go_on(client: Rpc) -> None:
    """Ask again after UNAVAILABLE, as a client does, until the service serves."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while (error := refusal(lambda: client.create().fill(1))) is not None:
        assert error.retryable, error
        assert time.monotonic() < deadline
        time.sleep(0.05)


def refusal(call: Callable[[], object]) -> RolloutBufferError | None:
    """The error that `call` fails with, None where it does not."""
    try:
        call()
    except grpc.RpcError as error:
        return failure_of(error)
    return None


# ── drain ────────────────────────────────────────────────────────────────────


def test_sigterm_ends_waits_finishes_streams_and_leaves_nothing_behind(own: ServiceProcess) -> None:
    client = connect(own.address)
    run = client.create(batch_groups=8)
    family = descendants(own.pid)
    requests: list[groups_pb2.PushGroupsRequest] = list(run.bundles([[make_group("x0")]]))
    stream_open = True

    def sent() -> Iterator[groups_pb2.PushGroupsRequest]:
        yield requests[0]
        while stream_open:
            time.sleep(0.02)

    with ThreadPoolExecutor() as pool:
        pushes = streamed(client.groups.PushGroups(sent(), timeout=TIMEOUT_S))
        assert next(pushes).acks[0].outcome == QUEUED
        watch = streamed(client.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S))
        next(watch)
        waits = [
            pool.submit(failure, lambda: run.lease(wait_ms=60_000)),
            pool.submit(failure, lambda: run.pull(0, wait_ms=60_000)),
            pool.submit(failure, lambda: list(watch)),
            pool.submit(failure, lambda: list(pushes)),
        ]
        for method in ("LeaseTasks", "PullBatch", "WatchWeights", "PushGroups"):
            own.until_metric(1, "rollout_buffer_open_rpcs", method=method)
        started = time.monotonic()
        status = own.stop()
        took_s = time.monotonic() - started
        errors = [wait.result(TIMEOUT_S) for wait in waits]
        stream_open = False
    assert status == 0
    assert took_s < 5
    assert [error.reason for error in errors] == ["not_ready"] * 4
    assert all(error.retryable for error in errors)
    until_gone(family)
    assert not (own.data_dir / "service.json").exists()
    client.channel.close()


def test_ctrl_c_ends_it_as_gracefully(own: ServiceProcess) -> None:
    assert own.process is not None
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(STOP_TIMEOUT_S) == 0
    assert "Traceback" not in own.log.read_text()


# ── restarts ─────────────────────────────────────────────────────────────────


def test_a_restart_finds_everything_again(own: ServiceProcess) -> None:
    client = connect(own.address)
    run = client.create(batch_groups=2, max_queued_groups=8)
    run.submit([make_task("a"), make_task("b")])
    lease = run.lease().leases[0]
    groups = run.fill(4)
    first = run.pull(0)[1]
    run.publish(1, commit_through_step=0)
    before = run.get()
    own.stop()
    own.start()
    after = run.get()
    assert after == before
    assert run.pull(0)[1] == first
    assert [item.group for item in run.pull(1)[1]] == groups[2:]
    assert run.push_one(make_group("a", lease_id=lease.lease_id)).outcome == QUEUED
    client.channel.close()


def test_kill_9_of_the_service_loses_no_acknowledged_group_and_leaves_no_process(own: ServiceProcess) -> None:
    client = connect(own.address)
    run = client.create(batch_groups=4, max_queued_groups=10_000)
    acked: list[str] = []
    bundles = [[make_group(f"k{i:05}", lengths=(500,))] for i in range(5_000)]

    def push_until_killed() -> None:
        for reply in client.groups.PushGroups(run.bundles(bundles), timeout=TIMEOUT_S):
            acked.extend(ack.group_id for ack in reply.acks)

    family = descendants(own.pid)
    with ThreadPoolExecutor() as pool:
        pushing = pool.submit(refusal, push_until_killed)
        while len(acked) < 50:
            time.sleep(0.005)
        own.kill()
        error = pushing.result(TIMEOUT_S)
    assert error is not None
    assert error.retryable
    until_gone(family)
    own.start()
    queued = run.get().groups.queued.groups
    assert len(acked) <= queued < 5_000
    delivered = [
        f"{item.group.header.task_id}/0" for step in range(queued // 4) for item in run.pull(step, wait_ms=5_000)[1]
    ]
    assert set(acked[: queued // 4 * 4]) <= set(delivered)
    assert len(delivered) == len(set(delivered))
    assert run.get().groups.balanced
    client.channel.close()


def test_clients_go_on_when_an_rpc_process_is_killed(own: ServiceProcess) -> None:
    client = connect(own.address)
    run = client.create()
    before = rpc_pids(own)
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    go_on(client)
    deadline = time.monotonic() + STARTS_WITHIN_S
    while len(now := rpc_pids(own)) != 2 or set(now) & set(before):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert run.get().run_id == run.run_id
    client.channel.close()


def test_the_embedded_store_is_started_again_when_it_is_killed(own: ServiceProcess) -> None:
    client = connect(own.address)
    run = client.create(batch_groups=2)
    run.fill(2)
    before = run.get()
    killed = store_pid(own)
    os.kill(killed, signal.SIGKILL)
    until_gone([killed])
    go_on(client)
    assert run.get() == before
    assert len(run.pull(0)[1]) == 2
    assert store_pid(own) != killed
    client.channel.close()


def test_the_store_may_be_away_for_a_while(tmp_path: Path) -> None:
    persistent = ("--appendonly", "yes", "--appendfsync", "no")
    with store_server(*persistent) as store, running_service(tmp_path, store=store.url) as service:
        client = connect(service.address)
        run = client.create(batch_groups=2)
        store.kill()
        error = failure(run.get)
        assert (error.reason, error.retryable) == ("store_unavailable", True)
        assert not alive(store.process.pid if store.process else 0)
        store.start()
        go_on(client)
        run.fill(2)
        client.channel.close()


# ── starts that are refused ──────────────────────────────────────────────────


def test_a_second_service_is_told_that_the_address_or_the_directory_is_taken(
    own: ServiceProcess, tmp_path: Path
) -> None:
    same_address = serve_once("--listen", own.address, "--admin", "127.0.0.1:0", "--data-dir", str(tmp_path / "b"))
    assert same_address.returncode == 1
    assert f"cannot listen on {own.address}: the address is in use" in same_address.stderr
    same_folder = serve_once("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data-dir", str(own.data_dir))
    assert same_folder.returncode == 1
    assert f"{own.data_dir} is in use by another service" in same_folder.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        admin = f"127.0.0.1:{taken.getsockname()[1]}"
        same_admin = serve_once("--listen", "127.0.0.1:0", "--admin", admin, "--data-dir", str(tmp_path / "c"))
    assert same_admin.returncode == 1
    assert f"cannot listen on {admin}" in same_admin.stderr
    client = connect(own.address)
    client.create()
    client.channel.close()


def test_a_store_that_evicts_is_refused_and_left_untouched(tmp_path: Path) -> None:
    with store_server("--maxmemory-policy", "allkeys-lru") as store:
        refused = serve_once(
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
            *("--data-dir", str(tmp_path / "data"), "--store", store.url),
        )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(store.socket))
            connection.sendall(b"DBSIZE\r\n")
            assert connection.recv(64) == b":0\r\n"
    assert refused.returncode == 1
    assert "maxmemory-policy is allkeys-lru" in refused.stderr
    assert "noeviction" in refused.stderr


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused = serve_once(
        *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        *("--data-dir", str(tmp_path / "data"), "--store", "redis://user:secret@127.0.0.1:1/0"),
    )
    assert refused.returncode == 1
    assert "127.0.0.1:1" in refused.stderr
    assert "secret" not in refused.stderr + refused.stdout


def test_a_store_without_memory_refuses_the_push_and_nothing_is_written(tmp_path: Path) -> None:
    with store_server("--maxmemory", "16mb") as store, running_service(tmp_path, store=store.url) as service:
        client = connect(service.address)
        run = client.create(batch_groups=1_000)
        accepted = 0
        error = None
        while error is None and accepted < 400:
            group = make_group(f"x{accepted}", lengths=(20_000,))
            error = refusal(lambda group=group: run.push([group]))  # type: ignore[misc]
            accepted += error is None
        assert error is not None
        assert (error.reason, error.retryable) == ("store_out_of_memory", True)
        assert run.get().groups.accepted.groups == accepted > 0
        client.channel.close()


# ── what the processes are made of ───────────────────────────────────────────


def test_the_supervisor_never_imports_grpc(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from buffer_service.settings import Settings\n"
        "from buffer_service.supervisor.run import serve\n"
        "async def main():\n"
        "    serving = asyncio.create_task(serve(settings))\n"
        "    while not (settings.data_dir / 'service.json').exists() and not serving.done():\n"
        "        await asyncio.sleep(0.02)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await serving\n"
        "settings = Settings(listen='127.0.0.1:0', admin='127.0.0.1:0', data_dir=sys.argv[1], rpc_processes=1)\n"
        "asyncio.run(main())\n"
        "print('grpc' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
