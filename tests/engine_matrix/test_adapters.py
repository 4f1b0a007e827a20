"""Adapters on a real SGLang server: what it generates under them beside the same weights merged; what it refuses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineLoadFailed
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.types import GeneratedSample, PauseMode, SampleRequest
from tests.support.adapters import write_adapter, write_adapter_and_merged
from tests.support.sglang_python import real_sglang
from tests.support.tiny_model import write_random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MOST, RANK = 3, 8
FLAGS = (
    "--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", "q_proj", "v_proj",
    "--max-loras-per-batch", str(MOST), "--lora-strict-loading",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("models") / "base")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangLauncher]:
    async with real_sglang(base, tmp_path_factory.mktemp("sglang"), *FLAGS) as launcher:
        yield launcher


@pytest_asyncio.fixture
async def engine(launcher: SglangLauncher) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(launcher.base_url, options=ServerOptions(generate_timeout_s=100))
    yield engine
    await engine.close()


def request(tokens: int = 12) -> SampleRequest:
    prompt = np.array([40, 41, 42], np.int32)
    return SampleRequest(
        sample_index=0, input_ids=prompt, max_new_tokens=tokens, temperature=1.0, top_k=2, ignore_eos=True, seed=1
    )


def greedy(tokens: int = 12) -> SampleRequest:
    prompt = np.array([40, 41, 42], np.int32)
    return SampleRequest(sample_index=0, input_ids=prompt, max_new_tokens=tokens, temperature=0.0, ignore_eos=True)


async def one(engine: SglangEngine, request: SampleRequest) -> GeneratedSample:
    (sample,) = await engine.generate([request])
    return sample


def labels(sample: GeneratedSample) -> list[tuple[str, int, int]]:
    return [(span.version_label, span.start, span.end) for span in sample.spans]


async def test_tokens_under_an_adapter_are_those_of_the_merged_weights(
    engine: SglangEngine, base: Path, tmp_path: Path
) -> None:
    made = []
    for version in (1, 2):
        adapter, merged = write_adapter_and_merged(base, tmp_path / str(version), seed=version)
        await engine.load_adapter(adapter, f"1.{version}")
        made.append((await one(engine, greedy()), merged))
    for version, (under, merged) in enumerate(made, 1):
        assert labels(under) == [(f"1.{version}", 0, 12)]
        await engine.pause(PauseMode.RETRACT)
        await engine.load_files(merged, f"2.{version}")
        await engine.resume()
        whole = await one(engine, greedy())
        assert labels(whole) == [(f"2.{version}", 0, 12)]
        assert under.output_ids.tolist() == whole.output_ids.tolist()
    assert made[0][0].output_ids.tolist() != made[1][0].output_ids.tolist()
    await engine.pause(PauseMode.RETRACT)
    await engine.load_files(base, "0")
    await engine.resume()


async def test_request_in_flight_keeps_its_adapter_while_others_come_and_go(
    engine: SglangEngine, base: Path, tmp_path: Path
) -> None:
    first, _ = write_adapter_and_merged(base, tmp_path / "1", seed=1)
    await engine.load_adapter(first, "1.1")
    alone = await one(engine, greedy(400))
    long = asyncio.create_task(one(engine, greedy(400)))
    while not engine.tokens_in_hand:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    for version in (2, 3, 4):
        adapter, _ = write_adapter_and_merged(base, tmp_path / str(version), seed=version)
        await engine.load_adapter(adapter, f"1.{version}")
        short = await one(engine, greedy(4))
        assert labels(short) == [(f"1.{version}", 0, 4)]
        assert not long.done()
    sample = await long
    assert labels(sample) == [("1.1", 0, 400)]
    assert sample.output_ids.tolist() == alone.output_ids.tolist()


async def test_log_probabilities_of_a_draw_are_those_under_the_adapter(
    engine: SglangEngine, base: Path, tmp_path: Path
) -> None:
    adapter, merged = write_adapter_and_merged(base, tmp_path, seed=5)
    await engine.load_adapter(adapter, "1.1")
    under = await one(engine, request())
    # What was drawn, scored by the merged weights: each token is one of two, with the probability that they give it.
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = torch.tensor([[40, 41, 42, *under.output_ids.tolist()]])
    with torch.no_grad():
        logits = network(ids).logits[0, 2:-1]
    top = torch.log_softmax(logits.topk(2).values, dim=-1)
    places = (logits.topk(2).indices == ids[0, 3:, None]).float().argmax(dim=-1)
    expected = top.gather(1, places[:, None])[:, 0].numpy()
    np.testing.assert_allclose(under.logprobs, expected, atol=1e-3)


async def test_refused_adapter_leaves_the_one_before_in_force(engine: SglangEngine, base: Path, tmp_path: Path) -> None:
    adapter, _ = write_adapter_and_merged(base, tmp_path / "1", seed=1)
    large, _ = write_adapter_and_merged(base, tmp_path / "2", seed=2, rank=2 * RANK)
    await engine.load_adapter(adapter, "1.1")
    with pytest.raises(EngineLoadFailed, match=f"with rank {2 * RANK} is incompatible") as raised:
        await engine.load_adapter(large, "1.2")
    assert raised.value.weights == "kept"
    other = write_adapter(tmp_path / "3", "model.layers.9.self_attn.q_proj", out=64, into=64)
    with pytest.raises(EngineLoadFailed, match=r"the engine's model has no model\.layers\.9"):
        await engine.load_adapter(other, "1.2")
    assert await engine.loaded_version() == "1.1"
    assert labels(await one(engine, greedy(4))) == [("1.1", 0, 4)]


async def test_next_worker_unloads_what_a_killed_one_left(
    launcher: SglangLauncher, engine: SglangEngine, base: Path, tmp_path: Path
) -> None:
    adapter, _ = write_adapter_and_merged(base, tmp_path / "1", seed=1)
    await engine.load_adapter(adapter, "1.1")
    following = SglangEngine(launcher.base_url)
    assert await following.loaded_version() == "0"
    await following.info()
    models = await following._calls.get("/v1/models", "")
    assert [card["parent"] for card in models["data"]] == [None]
    other, _ = write_adapter_and_merged(base, tmp_path / "2", seed=2)
    await following.load_adapter(other, "1.1")
    assert await following.loaded_version() == "1.1"
    await following.close()
