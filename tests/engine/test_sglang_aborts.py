"""SglangEngine.abort against FakeSglang: requests that are on their way, that wait, or that it does not let go."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollout_workers.engine.errors import EngineRejected, EngineTimeout, EngineUnavailable
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import PauseMode
from tests.engine.against_fake import QUICK, connected, request
from tests.engine.fake_sglang import FakeSglang, answer, never_answer, ok, refused


@pytest_asyncio.fixture(params=["streamed", "plain"])
async def engine(fake: FakeSglang, request: pytest.FixtureRequest) -> AsyncIterator[SglangEngine]:
    async with connected(fake, replace(QUICK, stream=request.param == "streamed")) as engine:
        yield engine


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- what the server has received can only be looked at
            await asyncio.sleep(0.005)


async def test_an_abort_that_came_before_its_request_is_repeated(engine: SglangEngine, fake: FakeSglang) -> None:
    aborted = asyncio.Event()

    async def until_aborted(body: Any) -> web.StreamResponse:
        await aborted.wait()
        return ok([answer(body["rid"][0], [7], finish_reason={"type": "abort", "message": "Aborted"})])

    async def deaf_at_first(body: Any) -> web.StreamResponse:
        if len(fake.received["/abort_request"]) > 1:
            aborted.set()
        return ok()

    fake.handlers["/generate"] = until_aborted
    fake.handlers["/abort_request"] = deaf_at_first
    asked = request()
    running = asyncio.create_task(engine.generate([asked]))
    await until(lambda: bool(fake.received["/generate"]))
    await engine.abort([asked.rid])
    (sample,) = await running
    assert (sample.finish_reason, sample.aborted_in_queue) == ("abort", False)


async def test_requests_held_by_a_pause_can_be_aborted(engine: SglangEngine, fake: FakeSglang) -> None:
    await engine.pause(PauseMode.RETRACT)
    given_up, kept = request(), request(sample_index=1)
    running = asyncio.create_task(engine.generate([given_up, kept]))
    alone = asyncio.create_task(engine.generate([abandoned := request()]))
    await asyncio.sleep(0)
    await engine.abort([given_up.rid, abandoned.rid])
    assert [sample.aborted_in_queue for sample in await alone] == [True]
    assert not running.done()
    assert "/generate" not in fake.received
    await engine.resume()
    first, second = await running
    assert (first.aborted_in_queue, len(first.output_ids), first.spans) == (True, 0, ())
    assert second.output_ids.tolist() == [7, 8]
    assert fake.received["/generate"][0]["rid"] == [kept.rid]


async def test_a_call_that_the_server_does_not_abort_ends_and_its_refusal_is_raised(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    async def broken(body: Any) -> web.StreamResponse:
        return refused("internal", status=500)

    fake.handlers["/generate"] = never_answer
    fake.handlers["/abort_request"] = broken
    asked, other = [request(), request(sample_index=1)], request()
    running = asyncio.create_task(engine.generate(asked))
    spared = asyncio.create_task(engine.generate([other]))
    await until(lambda: len(fake.received["/generate"]) == 2)
    with pytest.raises(EngineRejected, match="aborting a request"):
        await engine.abort([r.rid for r in asked])
    # The refusal of one did not keep the other from being sent, nor either from being sent again.
    assert [body["rid"] for body in fake.received["/abort_request"]].count(asked[1].rid) >= 3
    with pytest.raises(EngineUnavailable, match="it does not abort"):
        await asyncio.wait_for(running, 4)
    assert not spared.done()
    spared.cancel()
    await asyncio.wait({spared})


async def test_a_server_that_does_not_answer_an_abort_is_told_once(fake: FakeSglang, engine: SglangEngine) -> None:
    fake.handlers["/generate"] = never_answer
    fake.handlers["/abort_request"] = never_answer
    engine.options = replace(engine.options, control_timeout_s=0.2)
    asked = request()
    running = asyncio.create_task(engine.generate([asked]))
    await until(lambda: bool(fake.received["/generate"]))
    with pytest.raises(EngineTimeout, match="aborting a request"):
        await engine.abort([asked.rid])
    assert len(fake.received["/abort_request"]) == 1
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(running, 4)
