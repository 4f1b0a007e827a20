"""Streams of a real SGLang server: the same as plain answers, and what is left of them when the server is killed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.types import PauseMode, SampleRequest
from tests.engine.conftest import CONSTANT_TOKENS, Models
from tests.support.sglang_python import real_sglang

# One loop for the module: the tests share a server, and the last one kills it.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = np.array([40, 41, 42, 43, 44], dtype=np.int32)
STREAMED = ServerOptions(generate_timeout_s=60, stream_interval=8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangLauncher]:
    async with real_sglang(models.constant[0], tmp_path_factory.mktemp("sglang")) as launcher:
        yield launcher


@pytest_asyncio.fixture(loop_scope="module")
async def engine(server: SglangLauncher) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(server.base_url, options=STREAMED)
    yield engine
    await engine.close()


def group(size: int, max_new_tokens: int, **sampling: float) -> list[SampleRequest]:
    return [
        SampleRequest(sample_index=i, input_ids=PROMPT, max_new_tokens=max_new_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        for i in range(size)
    ]


async def until_in_hand(engine: SglangEngine, tokens: int) -> None:
    async with asyncio.timeout(60):
        while engine.tokens_in_hand < tokens:  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.005)


async def test_a_streamed_answer_is_the_plain_one(engine: SglangEngine, server: SglangLauncher) -> None:
    plain = SglangEngine(server.base_url, options=replace(STREAMED, stream=False))
    for sampling in ({}, {"top_p": 0.9}, {"temperature": 0.0}):
        for streamed, whole in zip(
            await engine.generate(group(4, 30, **sampling)), await plain.generate(group(4, 30, **sampling)), strict=True
        ):
            assert streamed.output_ids.tolist() == whole.output_ids.tolist() == [CONSTANT_TOKENS[0]] * 30
            assert np.allclose(streamed.logprobs, whole.logprobs, atol=1e-5)
            assert (streamed.spans, streamed.finish_reason) == (whole.spans, whole.finish_reason)
    await plain.close()


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_tokens_of_a_stream_over_a_reload_carry_their_versions(
    engine: SglangEngine, models: Models, mode: PauseMode
) -> None:
    await engine.load_files(models.constant[0], "1.0")
    running = asyncio.create_task(engine.generate(group(4, 1_000)))
    await until_in_hand(engine, 4 * 40)
    await engine.pause(mode)
    await engine.load_files(models.constant[1], "1.1")
    await engine.resume()
    for sample in await running:
        assert [span.version_label for span in sample.spans] == ["1.0", "1.1"]
        assert len(sample.output_ids) == 1_000
        for span, token in zip(sample.spans, CONSTANT_TOKENS, strict=False):
            assert set(sample.output_ids[span.start : span.end].tolist()) == {token}


async def test_an_aborted_stream_keeps_what_it_had(engine: SglangEngine, models: Models) -> None:
    await engine.load_files(models.constant[0], "1.2")
    asked = group(4, 4_000)
    running = asyncio.create_task(engine.generate(asked))
    await until_in_hand(engine, 4 * 40)
    await engine.abort([request.rid for request in asked])
    for sample in await running:
        assert sample.finish_reason == "abort"
        assert len(sample.output_ids) >= 32
        assert set(sample.output_ids.tolist()) == {CONSTANT_TOKENS[0]}


# Last: it kills the server.
async def test_kill_9_of_the_server_costs_no_token_that_had_arrived(
    engine: SglangEngine, server: SglangLauncher, models: Models
) -> None:
    await engine.load_files(models.constant[0], "1.3")
    asked = [*group(4, 3_000), *(replace(r, sample_index=r.sample_index + 4) for r in group(4, 3_000, top_p=0.9))]
    running = asyncio.create_task(engine.generate(asked))
    await until_in_hand(engine, 8 * 40)
    await engine.pause(PauseMode.RETRACT)
    await engine.load_files(models.constant[1], "1.4")
    await engine.resume()
    await until_in_hand(engine, engine.tokens_in_hand + 8 * 60)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    received, began = engine.tokens_in_hand, time.monotonic()
    with pytest.raises(EngineUnavailable) as raised:
        await running
    assert time.monotonic() - began < 15
    partial = raised.value.partial
    assert {sample.sample_index for sample in partial} == set(range(8))
    assert sum(len(sample.output_ids) for sample in partial) >= received
    truth = dict(zip(("1.3", "1.4"), CONSTANT_TOKENS, strict=False))
    for sample in partial:
        assert (sample.finish_reason, len(sample.output_ids)) == ("abort", len(sample.logprobs))
        assert np.isfinite(sample.logprobs).all()
        made_by = [label for token in sample.output_ids.tolist() for label, of in truth.items() if of == token]
        said = [span.version_label for span in sample.spans for _ in range(span.start, span.end)]
        assert len(said) == len(made_by)
        assert all(label <= true for label, true in zip(said, made_by, strict=True))
        assert set(made_by) == {"1.3", "1.4"}
