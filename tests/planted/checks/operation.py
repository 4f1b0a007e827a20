"""Operation CountPayloads, from both clients to the store."""

from pathlib import Path
from typing import Any

from buffer_service.security.roles import RULES, Role
from tests.support.service import running_service
from trainer_client import AsyncBufferClient, BufferClient

PATH = "/rollout_buffer.v1.RunService/CountPayloads"


async def test_both_clients_count_the_payloads_of_a_run(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        blocking: Any
        asynchronous: Any
        with BufferClient(service.address) as blocking:
            blocking.create_run("r")
            assert blocking.count_payloads("r") == (0, 0)
        async with AsyncBufferClient(service.address) as asynchronous:
            assert await asynchronous.count_payloads("r") == (0, 0)


def test_readers_may_ask() -> None:
    assert Role.READER in RULES[PATH].roles
