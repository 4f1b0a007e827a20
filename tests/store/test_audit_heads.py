"""The task that an audit finds in the beginning of a payload: of what says none, nothing is deleted."""

from typing import Any, cast

import pytest

from buffer_service.store.payloads.audit import HEAD_BYTES, Audit, _task_of
from rollout_buffer.v1 import groups_pb2

HEADER = groups_pb2.GroupHeader(task_id="mine").SerializeToString()
LOOKS_LIKE_A_TASK = b"\x0a\x03abc" + bytes(16)


def field(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | 2, len(body)]) + body


def test_the_task_of_a_group_is_found_though_its_header_is_cut_off() -> None:
    header = groups_pb2.GroupHeader(task_id="mine", lease_id="mine/0/1", environment="e" * 2 * HEAD_BYTES)
    group = groups_pb2.Group(header=header, payload=b"p" * 100).SerializeToString()
    assert _task_of(group[:HEAD_BYTES]) == "mine"


@pytest.mark.parametrize("head", [b"", field(2, LOOKS_LIKE_A_TASK) + field(1, HEADER)])
def test_what_does_not_begin_with_its_header_names_no_task(head: bytes) -> None:
    assert not head or groups_pb2.Group.FromString(head).header.task_id == "mine"
    assert _task_of(head) == ""


class Server:
    """Server with these keys, none of which expires."""

    name = "a server"

    def __init__(self, *keys: str) -> None:
        self._keys = [key.encode() for key in keys]

    async def ask(self, _traffic: object, commands: list[tuple[Any, ...]]) -> list[Any]:
        return [[b"0", self._keys] if command[0] == "SCAN" else -1 for command in commands]


@pytest.mark.parametrize("rest", ["1:2000000000", "9000000:1", f"{1 << 40}:524288", "9000000:5.4.3"])
async def test_a_key_that_a_pusher_made_up_is_left_alone(rest: str) -> None:
    server = cast("Any", Server(f"rb:p:r:{'a' * 32}:{'b' * 16}:{rest}"))
    nobody = cast("Any", None)
    assert await Audit(nobody, nobody, nobody, nobody).look_through(server) == 0
