"""Routed experts of a real SGLang server with a tiny Qwen3-MoE, beside the routing that transformers computes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3MoeForCausalLM

from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.types import PauseMode, SampleRequest
from tests.support.engine_columns import rows_of
from tests.support.sglang_python import real_sglang
from tests.support.tiny_model import TinyModelShape, write_random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SHAPE = TinyModelShape(experts=8, layers=3)
PROMPT = np.array([40, 41, 42, 43, 44], np.int32)
Experts = npt.NDArray[np.integer[Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    at = tmp_path_factory.mktemp("moe")
    return write_random_model(at / "0", seed=0, shape=SHAPE), write_random_model(at / "1", seed=1, shape=SHAPE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SglangLauncher]:
    async with real_sglang(models[0], tmp_path_factory.mktemp("sglang"), "--enable-return-routed-experts") as launcher:
        yield launcher


def routing(model: Path, ids: npt.NDArray[np.int32]) -> Experts:
    """Experts of every position, in ascending order: [T, layers, k]."""
    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.from_numpy(ids).long()[None], output_router_logits=True).router_logits
    chosen = [each.topk(SHAPE.experts_per_token, dim=-1).indices.sort(dim=-1).values for each in logits]
    return torch.stack(chosen, dim=1).numpy()


def ascending(rows: Experts) -> Experts:
    return np.sort(rows, axis=-1)


def request(index: int, tokens: int, ids: npt.NDArray[np.int32] = PROMPT, *, start: int = 0) -> SampleRequest:
    return SampleRequest(
        sample_index=index,
        input_ids=ids,
        max_new_tokens=tokens,
        ignore_eos=True,
        columns=("routed_experts",),
        experts_from=start,
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_routed_experts_are_those_of_the_model_over_calls_and_a_weight_update(
    launcher: SglangLauncher, models: tuple[Path, Path]
) -> None:
    engine = SglangEngine(launcher.base_url)
    assert (await engine.info()).context_length == SHAPE.context_length
    for sample in await engine.generate([request(i, 20) for i in range(4)]):
        rows = rows_of(sample)
        assert (sample.fault, rows.rows.dtype.name, rows.rows.shape) == ("", "uint8", (24, 3, 2))
        ids = np.concatenate([PROMPT, sample.output_ids])
        assert np.array_equal(ascending(rows.rows), routing(models[0], ids)[:-1])

    # Cut off by new weights, and gone on with under them: the rows of the second call are those of what it was given.
    work = asyncio.create_task(engine.generate([request(0, 3_000)]))
    await asyncio.sleep(1.0)
    await engine.pause(PauseMode.ABORT)
    (first,) = await work
    assert first.finish_reason == "abort"
    assert len(first.output_ids)
    await engine.load_files(models[1], "2.0")
    await engine.resume()
    so_far = np.concatenate([PROMPT, first.output_ids])
    before = rows_of(first)
    (second,) = await engine.generate([request(0, 8, so_far, start=before.end)])
    joined = before + rows_of(second)
    ids = np.concatenate([so_far, second.output_ids])
    assert (joined.start, joined.end) == (0, len(ids) - 1)
    assert np.array_equal(ascending(before.rows), routing(models[0], so_far)[: before.end])
    assert np.array_equal(ascending(rows_of(second).rows), routing(models[1], ids)[before.end : -1])
    await engine.close()
