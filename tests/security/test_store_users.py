"""The rights of the store's users that tokens of each role are given, over every command that the server has."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from buffer_service.security.roles import Role
from buffer_service.store.keys import index_key
from rollout_buffer.v1 import common_pb2, payloads_pb2, payloads_pb2_grpc
from tests.security.contract import call
from tests.security.guarded import Guarded
from tests.support.processes import children, command, until_gone
from tests.support.rpc import failure_of

RUN, KEY = "math-9", "rb:p:math-9:00:11:3"
OPEN = {"auth", "hello", "quit", "reset"}
"""Commands with which everybody logs in and out."""
WRITES, READS = {"set"}, {"get", "mget"}
GIVEN: dict[tuple[Role, str], set[str]] = {
    (Role.WORKER, "GetWriteAccess"): WRITES,
    (Role.TRAINER, "GetWriteAccess"): WRITES,
    (Role.TRAINER, "GetReadAccess"): READS,
    (Role.ADMIN, "GetWriteAccess"): WRITES,
    (Role.ADMIN, "GetReadAccess"): READS,
}
"""The commands that a role's access lets it use; other roles get no access at all (test_authorization.py)."""


@pytest.fixture(scope="module")
def store(guarded: Guarded) -> Iterator[Any]:
    """The store as the service itself enters it."""
    client: Any = redis.Redis(unix_socket_path=str(guarded.service.data_dir / "store" / "store.sock"))
    with contextlib.closing(client):
        yield client


@pytest.fixture(autouse=True)
def run(channel: grpc.Channel, tokens: dict[Role, str]) -> None:
    call(channel, "/rollout_buffer.v1.RunService/CreateRun", tokens[Role.ADMIN], RUN)


def access(channel: grpc.Channel, token: str, method: str) -> payloads_pb2.PayloadAccess:
    request = payloads_pb2.PayloadAccessRequest(run=common_pb2.RunRef(run_id=RUN), client_id="c")
    given: payloads_pb2.PayloadAccess = getattr(payloads_pb2_grpc.PayloadServiceStub(channel), method)(
        request, metadata=(("authorization", f"Bearer {token}"),), timeout=20
    )
    assert given.addresses, given
    return given


def access_if_up(channel: grpc.Channel, token: str) -> payloads_pb2.PayloadAccess | None:
    """A reader's access; None while the store is being started, as clients are told."""
    try:
        return access(channel, token, "GetReadAccess")
    except grpc.RpcError as error:
        if not failure_of(error).retryable:
            raise
        return None


def entered(given: payloads_pb2.PayloadAccess) -> Any:
    return redis.Redis(unix_socket_path=given.addresses[0].unix_path, username=given.username, password=given.password)


def commands(store: Any) -> Iterator[tuple[str, list[str]]]:
    """Every command and subcommand of the server, and arguments of the right number: a payload's key each time."""

    def all_of(infos: Any) -> Iterator[tuple[str, int]]:
        for info in infos:
            if not info[9]:
                yield info[0].decode(), abs(info[1])
            yield from all_of(info[9])

    for name, arity in all_of(raw_infos(store)):
        words = name.split("|")
        yield name, [*words, *[KEY] * (arity - len(words))]


def raw_infos(store: Any) -> Any:
    """The reply to COMMAND as it is: redis-py's own reading of it drops the subcommands."""
    connection = store.connection_pool.get_connection()
    try:
        connection.send_command("COMMAND")
        return connection.read_response()
    finally:
        store.connection_pool.release(connection)


@pytest.mark.parametrize(("role", "method"), GIVEN)
def test_of_all_commands_of_the_server_a_user_has_those_of_its_direction(
    role: Role, method: str, channel: grpc.Channel, tokens: dict[Role, str], store: Any
) -> None:
    user = access(channel, tokens[role], method).username
    allowed, tried = set(), 0
    for name, words in commands(store):
        tried += 1
        if store.execute_command("ACL", "DRYRUN", user, *words) == b"OK":
            allowed.add(name)
    assert tried > 300
    assert allowed - OPEN == GIVEN[role, method]


def test_a_writer_cannot_read_by_the_options_of_set_nor_leave_its_run(
    channel: grpc.Channel, tokens: dict[Role, str], store: Any
) -> None:
    writer = entered(access(channel, tokens[Role.WORKER], "GetWriteAccess"))
    with contextlib.closing(writer):
        assert writer.execute_command("SET", KEY, "abc", "NX", "PX", "60000")
        others = ("rb:p:math-8:00:11:3", "rb:p:math-90:00:11:3", "rb:p:math-9", index_key(RUN, "run"), "rb:schema")
        refused = [("SET", KEY, "x", "GET"), ("SET", KEY, "x", "NX", "GET"), *(("SET", key, "x") for key in others)]
        for words in refused:
            with pytest.raises((NoPermissionError, ResponseError), match="permission"):
                writer.execute_command(*words)
    assert store.get(KEY) == b"abc"
    assert not store.exists(*others[:3])


def test_a_restarted_store_has_lost_the_users_and_the_service_makes_them_again(
    channel: grpc.Channel, tokens: dict[Role, str], guarded: Guarded
) -> None:
    before = access(channel, tokens[Role.TRAINER], "GetReadAccess")
    (pid,) = [pid for pid in children(guarded.service.pid) if "valkey-server" in command(pid)]
    os.kill(pid, signal.SIGKILL)
    until_gone([pid])
    deadline = time.monotonic() + 30
    while (after := access_if_up(channel, tokens[Role.TRAINER])) is None:
        assert time.monotonic() < deadline
    assert (after.username, after.password) == (before.username, before.password)
    with contextlib.closing(entered(after)) as reader:
        assert reader.get(KEY) in {None, b"abc"}
