"""SglangEngine against FakeSglang: what it does when a server refuses, lies, hangs or goes away."""

import asyncio
import copy
import math
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import (
    EngineLoadFailed,
    EngineMalformed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import PauseMode, PrefixCache, VersionSpan
from tests.engine.against_fake import QUICK, connected, request
from tests.engine.fake_sglang import VOCABULARY, FakeSglang, answer, hang_up, never_answer, ok, refused
from tests.support.engine_columns import mask_of
from tests.support.tiny_model import write_random_model

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


@pytest_asyncio.fixture(params=["streamed", "plain"])
async def engine(fake: FakeSglang, request: pytest.FixtureRequest) -> AsyncIterator[SglangEngine]:
    async with connected(fake, replace(QUICK, stream=request.param == "streamed")) as engine:
        yield engine


# --- requests that never leave ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_ids": np.array([VOCABULARY], dtype=np.int32)}, "input_ids"),
        ({"input_ids": np.array([-1], dtype=np.int32)}, "input_ids"),
        ({"input_ids": np.array([], dtype=np.int32)}, "input_ids"),
        ({"input_ids": np.array([1, 2], dtype=np.int64)}, "input_ids"),
        ({"input_ids": np.array([[1, 2]], dtype=np.int32)}, "input_ids"),
        ({"input_ids": np.ones(91, dtype=np.int32)}, "input_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 98}, "max_new_tokens"),
        ({"stop_token_ids": (VOCABULARY,)}, "stop_token_ids"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 2.1}, "repetition_penalty"),
        ({"min_new_tokens": 97}, "min_new_tokens"),
        ({"columns": ("hidden_states",)}, "columns"),
        ({"rid": "short"}, "rid"),
    ],
)
async def test_what_the_server_must_not_see_is_refused_here(
    engine: SglangEngine, fake: FakeSglang, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidField) as error:
        await engine.generate([request(), request(**changes)])
    assert error.value.attributes["field"] == field
    assert not fake.received


async def test_a_rid_in_flight_cannot_be_used_again(engine: SglangEngine, fake: FakeSglang) -> None:
    fake.handlers["/generate"] = never_answer
    first = request()
    running = asyncio.create_task(engine.generate([first]))
    await until(lambda: bool(fake.received["/generate"]))
    with pytest.raises(InvalidField, match="rid"):
        await engine.generate([first])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_top_p_over_a_large_vocabulary_needs_a_top_k(engine: SglangEngine, fake: FakeSglang) -> None:
    fake.mask_max_tokens = VOCABULARY - 1
    limited = SglangEngine(fake.url, options=QUICK)
    with pytest.raises(InvalidField, match="sampling-mask-max-tokens"):
        await limited.generate([request(top_p=0.9)])
    await limited.close()


# --- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        answer("another rid", [7]),
        {"output_ids": [7]},
        answer("RID", [7], finish_reason={"type": "tired"}),
        answer("RID", [7], finish_reason=None),
        answer("RID", [7, 8], output_token_logprobs=[[-0.5, 7, None]]),
        answer("RID", [7], output_token_logprobs=[[None, 7, None]]),
        answer("RID", [7], output_token_logprobs=[[math.inf, 7, None]]),
        answer("RID", [7, 8], weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        answer("RID", [7, 8], weight_versions=[{"version": "1", "start": 1, "end": 2}]),
        answer("RID", [7, 8], weight_versions=None),
        answer("RID", [7, 8], completion_tokens=3),
        answer("RID", [2**31]),
        answer("RID", [7], finish_reason={"length": 1}),
        answer("RID", [7], finish_reason={"type": ["length"]}),
        answer("RID", [7], weight_versions=[{"version": "1", "end": 1}]),
        answer("RID", [7], output_token_logprobs=[["high", 7, None]]),
    ],
)
async def test_a_malformed_answer_is_not_used(engine: SglangEngine, fake: FakeSglang, entry: dict[str, Any]) -> None:
    asked, sibling, entry = request(), request(sample_index=1), copy.deepcopy(entry)
    if entry.get("meta_info", {}).get("id") == "RID":
        entry["meta_info"]["id"] = asked.rid

    async def reply(body: Any) -> web.StreamResponse:
        return ok([entry, *[answer(rid, [7]) for rid in body["rid"][1:]]])

    fake.handlers["/generate"] = reply
    bad, good = await engine.generate([asked, sibling])
    assert (bad.fault != "", len(bad.output_ids), bad.finish_reason) == (True, 0, "abort")
    assert (good.fault, good.output_ids.tolist(), good.sample_index) == ("", [7], 1)
    with pytest.raises(EngineMalformed):
        await engine.generate([asked])


@pytest.mark.parametrize(
    ("masks", "fault"),
    [
        ([[7], [9, 10]], "its own sampling mask excludes"),
        ([[7], []], "its own sampling mask excludes"),
        ([[7]], "1 sampling masks for 2 tokens"),
        ([[7], ["eight"]], "ValueError"),
        ([[7], 8], "TypeError"),
    ],
)
async def test_a_token_without_its_mask_is_malformed(
    engine: SglangEngine, fake: FakeSglang, masks: list[Any], fault: str
) -> None:
    async def reply(body: Any) -> web.StreamResponse:
        drawn = {"output_token_sampling_logprobs": [-0.1, -0.2]}
        good = answer(body["rid"][1], [7, 8], output_token_sampling_mask=[[7], [8, 9]], **drawn)
        return ok([answer(body["rid"][0], [7, 8], output_token_sampling_mask=masks, **drawn), good])

    fake.handlers["/generate"] = reply
    asked = {"top_p": 0.9, "columns": ("sampling_mask",)}
    bad, good = await engine.generate([request(**asked), request(sample_index=1, **asked)])
    assert fault in bad.fault
    assert (good.fault, mask_of(good).values.tolist()) == ("", [7, 8, 9])


async def test_where_nothing_is_excluded_there_is_no_mask(engine: SglangEngine, fake: FakeSglang) -> None:
    (sample,) = await engine.generate([request(columns=("sampling_mask",))])
    assert fake.received["/generate"][0]["return_sampling_mask"] is False
    assert mask_of(sample).counts.tolist() == [0, 0]


async def test_a_request_without_an_answer_is_noticed(engine: SglangEngine, fake: FakeSglang) -> None:
    async def reply(body: Any) -> web.StreamResponse:
        return ok([answer(body["rid"][0], [7])])

    fake.handlers["/generate"] = reply
    if engine.options.stream:
        first, second = await engine.generate([request(), request()])
        assert (first.fault, second.fault) == ("", "the stream ended without its last event")
    else:
        with pytest.raises(EngineMalformed, match="batch of 2"):
            await engine.generate([request(), request()])


async def test_spans_come_from_the_tokens_and_not_from_the_version_at_the_end(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    spans = [{"version": "1.3", "start": 0, "end": 2}, {"version": "1.4", "start": 2, "end": 3}]

    async def reply(body: Any) -> web.StreamResponse:
        return ok([answer(body["rid"][0], [7, 8, 9], weight_version="1.4", weight_versions=spans)])

    fake.handlers["/generate"] = reply
    (sample,) = await engine.generate([request(max_new_tokens=3)])
    assert sample.spans == (VersionSpan("1.3", 0, 2), VersionSpan("1.4", 2, 3))


async def test_of_an_aborted_sample_only_tokens_with_their_logprob_are_kept(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    async def reply(body: Any) -> web.StreamResponse:
        finish = {"type": "abort", "message": "Abort in waiting queue"}
        logprobs = [[-0.5, 7, None]]
        return ok([answer(body["rid"][0], [7, 8, 9], finish_reason=finish, output_token_logprobs=logprobs)])

    fake.handlers["/generate"] = reply
    (sample,) = await engine.generate([request()])
    assert sample.aborted_in_queue
    assert sample.output_ids.tolist() == [7]
    assert sample.spans == (VersionSpan("1.0", 0, 1),)


# --- generation that fails --------------------------------------------------------------------------------------


async def test_a_generation_whose_connection_breaks_is_not_sent_again(engine: SglangEngine, fake: FakeSglang) -> None:
    fake.handlers["/generate"] = hang_up
    asked = request()
    with pytest.raises(EngineUnavailable) as error:
        await engine.generate([asked])
    assert error.value.retryable
    assert len(fake.received["/generate"]) == 1
    assert {"rid": asked.rid} in fake.received["/abort_request"]


async def test_a_full_queue_is_a_retryable_refusal_and_the_rest_of_the_batch_is_aborted(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    async def full(body: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": "The request queue is full."}}, status=503)

    fake.handlers["/generate"] = full
    asked = [request(), request()]
    with pytest.raises(EngineRejected, match="queue is full") as error:
        await engine.generate(asked)
    assert error.value.retryable
    assert {body["rid"] for body in fake.received["/abort_request"]} == {r.rid for r in asked}


async def test_fault_found_by_the_server_is_not_retryable(engine: SglangEngine, fake: FakeSglang) -> None:
    async def at_fault(body: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": "unknown parameter"}}, status=400)

    fake.handlers["/generate"] = at_fault
    with pytest.raises(EngineRejected) as error:
        await engine.generate([request()])
    assert not error.value.retryable


async def test_a_server_that_never_answers_is_a_timeout_that_names_the_wait(
    engine: SglangEngine, fake: FakeSglang
) -> None:
    fake.handlers["/generate"] = never_answer
    asked = request()
    with pytest.raises(EngineTimeout, match=r"within 0\.1 s while generating 1 samples"):
        await engine.generate([asked], deadline_s=0.1)
    assert {"rid": asked.rid} in fake.received["/abort_request"]


async def test_a_pause_that_lasts_longer_than_the_deadline_is_a_timeout(engine: SglangEngine) -> None:
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(EngineTimeout, match="waiting for it to be resumed"):
        await engine.generate([request()], deadline_s=0.05)


# --- a server that is away --------------------------------------------------------------------------------------


async def test_a_server_that_is_gone_is_given_up_soon(unused_port: int) -> None:
    engine = SglangEngine(f"http://127.0.0.1:{unused_port}", options=QUICK)
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match="asking for its settings"):
        await engine.generate([request()], deadline_s=60)
    assert time.monotonic() - started < 5
    assert not await engine.ready()
    await engine.close()


async def test_a_control_call_is_repeated_when_its_connection_breaks(engine: SglangEngine, fake: FakeSglang) -> None:
    fake.in_turn("/pause_generation", hang_up, fake.handlers["/pause_generation"])
    await engine.pause(PauseMode.RETRACT)
    assert len(fake.received["/pause_generation"]) == 2


async def test_a_failed_pause_lets_requests_pass_again(engine: SglangEngine, fake: FakeSglang) -> None:
    async def broken(body: Any) -> web.StreamResponse:
        return refused("no", status=500)

    fake.handlers["/pause_generation"] = broken
    with pytest.raises(EngineRejected):
        await engine.pause(PauseMode.RETRACT)
    assert len(await engine.generate([request()])) == 1


async def test_a_server_that_does_not_tell_its_vocabulary_is_not_used(fake: FakeSglang) -> None:
    async def answers(body: Any) -> web.StreamResponse:
        return ok([answer("x", [1])])

    fake.handlers["/generate"] = answers
    engine = SglangEngine(fake.url, options=QUICK)
    with pytest.raises(EngineMalformed, match="vocabulary"):
        await engine.info()
    await engine.close()


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("weights") / "model")


@pytest.mark.parametrize(
    ("mode", "flush"), [(PauseMode.RETRACT, True), (PauseMode.ABORT, True), (PauseMode.IN_PLACE, False)]
)
async def test_the_cache_is_flushed_unless_requests_sit_in_place(
    engine: SglangEngine, fake: FakeSglang, weights: Path, mode: PauseMode, flush: bool
) -> None:
    await engine.pause(mode)
    await engine.load_files(weights, "1.1")
    await engine.resume()
    (update,) = fake.received["/update_weights_from_disk"]
    assert update["flush_cache"] is flush
    assert update["abort_all_requests"] is False
    assert fake.received["/pause_generation"] == [{"mode": str(mode)}]
    assert await engine.loaded_version() == "1.1"


async def test_weights_applied_without_a_flush_are_relabelled_without_aborting(
    engine: SglangEngine, fake: FakeSglang, weights: Path
) -> None:
    async def not_flushed(body: Any) -> web.StreamResponse:
        return refused(NOT_FLUSHED)

    fake.handlers["/update_weights_from_disk"] = not_flushed
    await engine.load_files(weights, "1.2")
    assert fake.received["/update_weight_version"] == [{"new_version": "1.2", "abort_all_requests": False}]
    assert await engine.loaded_version() == "1.2"


async def test_a_label_that_does_not_stick_is_a_failed_load(
    engine: SglangEngine, fake: FakeSglang, weights: Path
) -> None:
    async def forgets(body: Any) -> web.StreamResponse:
        return ok({"success": True})

    fake.handlers["/update_weights_from_disk"] = forgets
    with pytest.raises(EngineLoadFailed, match=r"reports 1\.0 afterwards") as error:
        await engine.load_files(weights, "1.3")
    assert error.value.weights == "unknown"


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("Failed to get weights iterator: no such file.", "kept"),
        ("Failed to update weights: shape.\nRolling back to original weights.", "unknown"),
    ],
)
async def test_a_refused_load_says_what_the_engine_is_left_with(
    engine: SglangEngine, fake: FakeSglang, weights: Path, message: str, left: str
) -> None:
    async def refuses(body: Any) -> web.StreamResponse:
        return refused(message)

    fake.handlers["/update_weights_from_disk"] = refuses
    with pytest.raises(EngineLoadFailed) as error:
        await engine.load_files(weights, "1.4")
    assert error.value.weights == left
    assert "/update_weight_version" not in fake.received


async def test_a_load_during_which_the_server_dies_is_reported_as_such(
    engine: SglangEngine, fake: FakeSglang, weights: Path
) -> None:
    fake.handlers["/update_weights_from_disk"] = hang_up
    with pytest.raises(EngineUnavailable, match=r"loading 1\.5"):
        await engine.load_files(weights, "1.5")


async def test_new_requests_use_a_prefix_cache_of_their_version(
    engine: SglangEngine, fake: FakeSglang, weights: Path
) -> None:
    await engine.generate([request()])
    await engine.load_files(weights, "1.6")
    await engine.generate([request()])
    assert keys(fake) == [["1.0"], ["1.6"]]


async def test_a_group_goes_on_with_what_was_cached_since_it_began(fake: FakeSglang, weights: Path) -> None:
    async with connected(fake, replace(QUICK, prefix_cache=PrefixCache.GROUP)) as engine:
        await engine.generate([request()])
        for label in ("1.6", "1.7"):
            await engine.load_files(weights, label)
        await engine.generate([replace(request(), begun_with="1.6"), request()])
    assert keys(fake) == [["1.0"], ["1.6", "1.7"]]
    assert [body["flush_cache"] for body in fake.received["/update_weights_from_disk"]] == [False, False]


async def test_what_another_worker_has_cached_is_of_no_use(fake: FakeSglang) -> None:
    named = []
    for _ in range(2):
        async with connected(fake, QUICK) as engine:
            await engine.generate([request()])
            named += fake.received["/generate"][-1]["extra_key"]
    first, second = named
    assert first != second


async def test_by_default_what_was_cached_before_a_load_is_of_no_use(
    engine: SglangEngine, fake: FakeSglang, weights: Path
) -> None:
    await engine.load_files(weights, "1.6")
    await engine.load_files(weights, "1.7")
    await engine.generate([replace(request(), begun_with="1.6")])
    assert keys(fake) == [["1.7"]]
    assert [body["flush_cache"] for body in fake.received["/update_weights_from_disk"]] == [True, True]


# --- helpers ----------------------------------------------------------------------------------------------------


def keys(fake: FakeSglang) -> list[list[str]]:
    """Keys of the prefix caches of each call, without the names of their connections."""
    return [[key.partition("/")[2] for key in body["extra_key"]] for body in fake.received["/generate"]]


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- what the server has received can only be looked at
            await asyncio.sleep(0.005)
