"""SglangEngine's groups of broadcasts against FakeSglang: joining, leaving, and what is left behind when it fails."""

import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineLoadFailed, EngineRejected, EngineTimeout
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import ProcessGroup
from tests.engine.against_fake import connected
from tests.engine.fake_sglang import FakeSglang, never_answer, refused

QUICK = ServerOptions(control_timeout_s=1, load_timeout_s=1, reconnect_s=0.5)


@pytest_asyncio.fixture
async def engine(fake: FakeSglang) -> AsyncIterator[SglangEngine]:
    async with connected(fake, QUICK) as engine:
        yield engine


@pytest.fixture
def meeting_point() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def process_group(port: int, **changes: Any) -> ProcessGroup:
    made = {"group_name": "g", "backend": "gloo", "master_address": "127.0.0.1", "rank": 1, "world_size": 3}
    return ProcessGroup(master_port=port, **{**made, **changes})


async def test_join_gives_an_older_group_of_the_name_up_first(
    fake: FakeSglang, engine: SglangEngine, meeting_point: int
) -> None:
    fake.groups.add("g")
    await engine.join_group(process_group(meeting_point), deadline_s=5)
    assert fake.order == ["/destroy_weights_update_group", "/init_weights_update_group"]
    assert fake.received["/init_weights_update_group"] == [
        {
            "master_address": "127.0.0.1",
            "master_port": meeting_point,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g",
            "backend": "gloo",
        }
    ]


async def test_engine_is_not_sent_where_nobody_listens(fake: FakeSglang, engine: SglangEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EngineLoadFailed, match=f"nobody listens at 127.0.0.1:{port}") as failed:
        await engine.join_group(process_group(port), deadline_s=0.3)
    assert failed.value.weights == "kept"
    assert "/init_weights_update_group" not in fake.order


async def test_group_that_does_not_come_about_keeps_the_weights(
    fake: FakeSglang, engine: SglangEngine, meeting_point: int
) -> None:
    async def refuse(body: Any) -> web.StreamResponse:
        return refused("Failed to initialize custom process group: Connection was likely closed.")

    fake.handlers["/init_weights_update_group"] = refuse
    with pytest.raises(EngineLoadFailed, match="likely closed") as failed:
        await engine.join_group(process_group(meeting_point), deadline_s=5)
    assert failed.value.weights == "kept"


async def test_join_is_asked_for_once_even_when_it_takes_too_long(
    fake: FakeSglang, engine: SglangEngine, meeting_point: int
) -> None:
    fake.handlers["/init_weights_update_group"] = never_answer
    with pytest.raises(EngineTimeout):
        await engine.join_group(process_group(meeting_point), deadline_s=0.3)
    assert fake.order.count("/init_weights_update_group") == 1


async def test_leaving_a_group_that_one_is_not_in_is_no_error(fake: FakeSglang, engine: SglangEngine) -> None:
    await engine.leave_group("g")

    async def unknown_command(body: Any) -> web.StreamResponse:
        return web.json_response({"detail": "Not Found"}, status=404)

    fake.handlers["/destroy_weights_update_group"] = unknown_command
    await engine.leave_group("g")


async def test_failure_to_leave_is_an_error(fake: FakeSglang, engine: SglangEngine) -> None:
    async def fails(body: Any) -> web.StreamResponse:
        return refused("Failed to destroy custom process group: no")

    fake.handlers["/destroy_weights_update_group"] = fails
    with pytest.raises(EngineRejected):
        await engine.leave_group("g")
