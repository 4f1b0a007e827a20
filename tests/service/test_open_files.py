"""The limit of open files: raised where it may be, held against the connections, and named where it is too low."""

import contextlib
import resource
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from buffer_service.supervisor.open_files import LEAST_CONNECTIONS, OTHER_FILES
from rollout_buffer.v1 import runs_pb2, runs_pb2_grpc
from tests.support.service import ServiceFailed, ServiceProcess

LIMIT = 160
ROOM_WITHIN_S = 20


def limited(folder: Path, limit: str) -> ServiceProcess:
    """A service that is started within a shell's ulimit."""
    within = ("sh", "-c", f'ulimit {limit} && exec "$@"', "sh")
    return ServiceProcess(folder / "data", {"rpc_processes": 1, "drain_grace_s": 1}, within=within)


def codes(address: str, count: int) -> list[grpc.StatusCode]:
    """Return what calls over connections of their own, all open at once, are answered."""
    found: list[grpc.StatusCode] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            channel = stack.enter_context(grpc.insecure_channel(address, options))
            try:
                runs_pb2_grpc.RunServiceStub(channel).ListRuns(runs_pb2.ListRunsRequest(), timeout=20)
                found.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                found.append(error.code())
    return found


def is_live(admin: str) -> bool:
    """True where the admin page answers; False where it says that there are too many connections, or ends this one."""
    try:
        with urllib.request.urlopen(f"{admin}/livez", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until_there_is_room(ask: Callable[[], bool]) -> None:
    """Ask until it is answered: a server notices a moment later that its clients have left."""
    deadline = time.monotonic() + ROOM_WITHIN_S
    while not ask():
        assert time.monotonic() < deadline, "no room, although all clients have left"


def test_connections_beyond_the_limit_are_refused_and_none_hangs(tmp_path: Path) -> None:
    service = limited(tmp_path, f"-n {LIMIT}")
    service.start()
    try:
        room = LIMIT - OTHER_FILES
        answers = codes(service.address, room + 40)
        assert answers[: room - 1] == [grpc.StatusCode.OK] * (room - 1)
        assert set(answers[room:]) == {grpc.StatusCode.UNAVAILABLE}, "refused, not left until a deadline"
        until_there_is_room(lambda: codes(service.address, 1) == [grpc.StatusCode.OK])
        host, _, port = service.admin.removeprefix("http://").rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(LIMIT + 40):
                stack.enter_context(socket.create_connection((host, int(port))))
        until_there_is_room(lambda: is_live(service.admin))
        log = service.log.read_text()
        assert f"open_files={LIMIT}" in log
        assert "max_connections=16384" in log
        assert f"connections_of_a_process={room}" in log
        assert "Traceback" not in log
        assert "[error" not in log
    finally:
        service.stop()


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    service = limited(tmp_path, f"-S -n {LIMIT}")
    service.start()
    try:
        limits = Path(f"/proc/{service.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert int(line.split()[3]) >= min(16_384, hard)
        assert codes(service.address, LIMIT) == [grpc.StatusCode.OK] * LIMIT
    finally:
        service.stop()


def test_a_limit_that_leaves_no_connections_is_named(tmp_path: Path) -> None:
    limit = OTHER_FILES + LEAST_CONNECTIONS - 1
    service = limited(tmp_path, f"-n {limit}")
    with pytest.raises(ServiceFailed):
        service.start()
    log = service.log.read_text()
    assert f"may open {limit} files" in log
    assert "max_connections of 16384" in log
