"""SglangEngine over streams of FakeSglang that break off, stall, or find no room: what had arrived is not lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineMalformed, EngineRejected, EngineTimeout, EngineUnavailable
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import EngineLoad, PauseMode, SampleRequest, VersionSpan
from tests.engine.against_fake import connected
from tests.engine.fake_sglang import FakeSglang, answer, event, hang_up, ok

PROMPT = np.array([3, 4, 5], dtype=np.int32)
QUICK = ServerOptions(
    control_timeout_s=2, generate_timeout_s=5, abort_grace_s=0.2, reconnect_s=0.5, full_queue_wait_s=2.0
)
DONE = b"data: [DONE]\n\n"
FULL = {"type": "abort", "message": "The request queue is full.", "status_code": 503}


@pytest_asyncio.fixture
async def engine(fake: FakeSglang) -> AsyncIterator[SglangEngine]:
    async with connected(fake, QUICK) as engine:
        yield engine


def requests(count: int) -> list[SampleRequest]:
    return [SampleRequest(sample_index=i, input_ids=PROMPT, max_new_tokens=8) for i in range(count)]


def chunk(rid: str, index: int, tokens: Sequence[int], **meta: Any) -> bytes:
    """An event that is not the last of its sample."""
    made = answer(rid, list(tokens), finish_reason=None, **meta)
    del made["meta_info"]["weight_versions"]
    return event({**made, "index": index})


def last(rid: str, index: int, tokens: Sequence[int], **meta: Any) -> bytes:
    return event({**answer(rid, list(tokens), **meta), "index": index})


class Stream:
    """A reply to /generate that is written while the test goes on."""

    def __init__(self, fake: FakeSglang) -> None:
        self.rids: list[str] = []
        self.started = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        fake.handlers["/generate"] = self._reply

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self._parts.put_nowait(part)

    def break_off(self) -> None:
        self._parts.put_nowait(None)

    async def _reply(self, body: Any) -> web.StreamResponse:
        self.rids = body["rid"]
        self.started.set()
        return web.Response(body=self._written(), content_type="text/event-stream")

    async def _written(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part
            if part is DONE:
                return
        raise ConnectionResetError("the test breaks the stream off")


async def until_received(engine: SglangEngine, tokens: int) -> None:
    """Wait until the engine has so many tokens of the call in hand."""
    async with asyncio.timeout(5):
        while engine.tokens_in_hand < tokens:  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.005)


async def test_a_call_whose_server_dies_brings_what_had_arrived(engine: SglangEngine, fake: FakeSglang) -> None:
    stream = Stream(fake)
    asked = requests(3)
    running = asyncio.create_task(engine.generate(asked))
    await stream.started.wait()
    stream.send(chunk(asked[0].rid, 0, [7]), last(asked[1].rid, 1, [8, 9]), chunk(asked[0].rid, 0, [7, 11, 12]))
    await until_received(engine, 5)
    stream.break_off()
    with pytest.raises(EngineUnavailable) as raised:
        await running
    cut, finished = raised.value.partial
    assert (cut.sample_index, cut.output_ids.tolist(), cut.finish_reason) == (0, [7, 11, 12], "abort")
    assert (cut.logprobs.tolist(), cut.spans) == ([-0.5, -0.5, -0.5], (VersionSpan("1.0", 0, 3),))
    assert (finished.sample_index, finished.output_ids.tolist(), finished.finish_reason) == (1, [8, 9], "length")


async def test_a_stream_that_ends_early_in_good_order_is_a_dead_server_too(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    async def half(body: Any) -> web.StreamResponse:
        return web.Response(body=chunk(body["rid"][0], 0, [7]), content_type="text/event-stream")

    fake.handlers["/generate"] = half
    with pytest.raises(EngineUnavailable, match="ended its stream before the end") as raised:
        await engine.generate(requests(1))
    assert [sample.output_ids.tolist() for sample in raised.value.partial] == [[7]]


async def test_a_server_that_falls_silent_brings_what_had_arrived_at_the_deadline(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    stream = Stream(fake)
    asked = requests(1)
    stream.send(chunk(asked[0].rid, 0, [7, 8]))
    with pytest.raises(EngineTimeout) as raised:
        await engine.generate(asked, deadline_s=0.5)
    assert [sample.output_ids.tolist() for sample in raised.value.partial] == [[7, 8]]
    assert {"rid": asked[0].rid} in fake.received["/abort_request"]


async def test_calls_to_a_server_that_is_known_to_be_gone_end_with_what_had_arrived(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    stream = Stream(fake)
    asked = requests(1)
    running = asyncio.create_task(engine.generate(asked))
    await stream.started.wait()
    stream.send(chunk(asked[0].rid, 0, [7, 8]))
    await until_received(engine, 2)
    engine.give_up("its machine is away")
    with pytest.raises(EngineUnavailable, match="its machine is away") as raised:
        await running
    assert [sample.output_ids.tolist() for sample in raised.value.partial] == [[7, 8]]
    # Later calls are not concerned.
    fake.handlers["/generate"] = FakeSglang().handlers["/generate"]
    assert len((await engine.generate(requests(1)))[0].output_ids) == 2


async def test_tokens_of_a_cancelled_call_are_counted_once(engine: SglangEngine, fake: FakeSglang) -> None:
    stream = Stream(fake)
    asked = requests(2)
    running = asyncio.create_task(engine.generate(asked))
    await stream.started.wait()
    stream.send(chunk(asked[0].rid, 0, [7, 8]), chunk(asked[1].rid, 1, [9]))
    await until_received(engine, 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {body["rid"] for body in fake.received["/abort_request"]} == {r.rid for r in asked}
    assert (engine.take_cut_off(), engine.take_cut_off()) == (3, 0)


@pytest.mark.parametrize("how", ["breaks", "cancelled", "given up", "complete", "silent"])
async def test_nothing_decodes_after_a_call(engine: SglangEngine, fake: FakeSglang, how: str) -> None:
    stream, changes = Stream(fake), list[int]()
    engine.on_decoding = changes.append
    asked = requests(3)
    running = asyncio.create_task(engine.generate(asked, deadline_s=1.0 if how == "silent" else 5.0))
    await stream.started.wait()
    stream.send(chunk(asked[0].rid, 0, [7]), chunk(asked[1].rid, 1, [9]), last(asked[1].rid, 1, [9, 8]))
    await until_received(engine, 3)
    assert changes == [1, 1, -1]
    match how:
        case "breaks":
            stream.break_off()
        case "cancelled":
            running.cancel()
        case "given up":
            engine.give_up("its machine is away")
        case "complete":
            stream.send(last(asked[0].rid, 0, [7, 7]), last(asked[2].rid, 2, [7]), DONE)
        case "silent":
            pass
        case _:
            raise ValueError(how)
    await asyncio.wait({running})
    assert (running.cancelled() or running.exception() is not None) == (how != "complete")
    assert changes == [1, 1, -1, -1]


async def test_without_a_stream_the_requests_decode_while_the_answer_is_awaited(fake: FakeSglang) -> None:
    engine, changes = SglangEngine(fake.url, options=replace(QUICK, stream=False)), list[int]()
    await engine.info()
    engine.on_decoding = changes.append
    await engine.generate(requests(3))
    assert changes == [3, -3]
    fake.handlers["/generate"] = hang_up
    with pytest.raises(EngineUnavailable):
        await engine.generate(requests(2))
    assert changes == [3, -3, 2, -2]
    await engine.close()


async def test_an_event_that_is_none_ends_the_call_and_keeps_the_siblings(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    stream = Stream(fake)
    asked = requests(2)
    stream.send(last(asked[0].rid, 0, [7]), b"data: {broken\n\n")
    with pytest.raises(EngineMalformed, match="no JSON") as raised:
        await engine.generate(asked)
    assert [sample.output_ids.tolist() for sample in raised.value.partial] == [[7]]


async def test_a_request_that_found_the_queue_full_is_sent_again_alone(engine: SglangEngine, fake: FakeSglang) -> None:
    asked = requests(2)

    async def one_is_refused(body: Any) -> web.StreamResponse:
        events = last(asked[0].rid, 0, [7]) + chunk(asked[1].rid, 1, []).replace(
            b'"finish_reason":null', b'"finish_reason":' + event(FULL)[6:-2]
        )
        return web.Response(body=events + DONE, content_type="text/event-stream")

    fake.in_turn("/generate", one_is_refused, fake.handlers["/generate"])
    first, second = await engine.generate(asked)
    assert (first.output_ids.tolist(), second.output_ids.tolist()) == ([7], [7, 8])
    assert [body["rid"] for body in fake.received["/generate"]] == [[r.rid for r in asked], [asked[1].rid]]


async def test_a_queue_that_stays_full_is_a_retryable_refusal_with_what_the_siblings_made(fake: FakeSglang) -> None:
    engine = SglangEngine(fake.url, options=replace(QUICK, full_queue_wait_s=0.3))
    await engine.info()
    asked = requests(2)

    async def one_is_refused(body: Any) -> web.StreamResponse:
        events = b"".join(
            last(rid, i, [7]) if rid == asked[0].rid else last(rid, i, [], finish_reason=FULL)
            for i, rid in enumerate(body["rid"])
        )
        return web.Response(body=events + DONE, content_type="text/event-stream")

    fake.handlers["/generate"] = one_is_refused
    with pytest.raises(EngineRejected, match="queue is full") as raised:
        await engine.generate(asked)
    assert raised.value.retryable
    assert [sample.output_ids.tolist() for sample in raised.value.partial] == [[7]]
    assert len(fake.received["/generate"]) > 2
    await engine.close()


async def test_a_request_that_waits_for_room_can_be_aborted(engine: SglangEngine, fake: FakeSglang) -> None:
    refused = asyncio.Event()

    async def full(body: Any) -> web.StreamResponse:
        refused.set()
        return web.Response(
            body=last(body["rid"][0], 0, [], finish_reason=FULL) + DONE, content_type="text/event-stream"
        )

    fake.handlers["/generate"] = full
    asked = requests(1)
    running = asyncio.create_task(engine.generate(asked))
    await refused.wait()
    await engine.abort([asked[0].rid])
    (sample,) = await running
    assert (sample.finish_reason, sample.aborted_in_queue) == ("abort", True)


async def test_the_load_is_summed_over_the_servers_ranks(engine: SglangEngine, fake: FakeSglang) -> None:
    ranks: list[dict[str, Any]] = [
        {"num_running_reqs": 3, "num_waiting_reqs": 0, "token_usage": 0.25},
        {"num_running_reqs": 4, "num_waiting_reqs": 2, "token_usage": 0.5},
    ]

    async def loads(body: Any) -> web.StreamResponse:
        return ok({"loads": ranks})

    fake.handlers["/v1/loads"] = loads
    assert await engine.load() == EngineLoad(running=7, waiting=2, token_usage=0.5)
    ranks[0] = {"num_running_reqs": "many"}
    with pytest.raises(EngineMalformed, match="its load"):
        await engine.load()


async def test_events_are_asked_for_every_so_many_tokens_and_seldom_where_they_repeat(fake: FakeSglang) -> None:
    for incremental, intervals in [(True, [2, 2]), (False, [2, 6])]:
        fake.incremental = incremental
        engine = SglangEngine(fake.url, options=replace(QUICK, stream_interval=2))
        short = SampleRequest(sample_index=0, input_ids=PROMPT, max_new_tokens=8)
        await engine.generate([short, replace(short, max_new_tokens=90, rid="r" * 32)])
        sampling = fake.received["/generate"][-1]["sampling_params"]
        assert [one["stream_interval"] for one in sampling] == intervals
        await engine.close()


async def test_a_stream_goes_on_over_a_pause(engine: SglangEngine, fake: FakeSglang) -> None:
    stream = Stream(fake)
    asked = requests(1)
    running = asyncio.create_task(engine.generate(asked))
    await stream.started.wait()
    stream.send(chunk(asked[0].rid, 0, [7, 8]))
    await engine.pause(PauseMode.RETRACT)
    spans = [{"version": "1.0", "start": 0, "end": 2}, {"version": "1.1", "start": 2, "end": 3}]
    await engine.resume()
    stream.send(last(asked[0].rid, 0, [7, 8, 9], weight_versions=spans), DONE)
    (sample,) = await running
    assert sample.spans == (VersionSpan("1.0", 0, 2), VersionSpan("1.1", 2, 3))
