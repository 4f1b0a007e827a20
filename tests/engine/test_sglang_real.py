"""SglangEngine against a real SGLang server: what it promises of tokens, versions, log-probabilities and faults."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineLoadFailed
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.types import GeneratedSample, PauseMode, SampleRequest
from tests.engine.conftest import CONSTANT_TOKENS, SHAPE, Models
from tests.support.engine_columns import mask_of, values_of
from tests.support.processes import children, command
from tests.support.tiny_model import EOS_ID

# The first of these to run starts the server.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = np.array([40, 41, 42, 43, 44], dtype=np.int32)


def group(
    size: int, max_new_tokens: int, prompt: npt.NDArray[np.int32] = PROMPT, **sampling: Any
) -> list[SampleRequest]:
    return [
        SampleRequest(sample_index=i, input_ids=prompt, max_new_tokens=max_new_tokens, **sampling) for i in range(size)
    ]


async def reload(engine: SglangEngine, path: Path, label: str, mode: PauseMode = PauseMode.RETRACT) -> None:
    await engine.pause(mode)
    await engine.load_files(path, label)
    await engine.resume()


async def until_running(engine: SglangEngine, count: int, *, within_s: float = 20) -> None:
    """Wait until the server decodes `count` requests."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(within_s):
        while await running(session, engine) != count:  # noqa: ASYNC110 -- the server can only be asked
            await asyncio.sleep(0.02)


async def running(session: aiohttp.ClientSession, engine: SglangEngine) -> int:
    async with session.get(engine.address + "/v1/loads") as response:
        return sum(load["num_running_reqs"] for load in (await response.json())["loads"])


def versions_by_token(samples: Sequence[GeneratedSample]) -> set[tuple[int, str]]:
    """All pairs of (token, label of the version that its span names)."""
    return {
        (int(token), span.version_label)
        for sample in samples
        for span in sample.spans
        for token in sample.output_ids[span.start : span.end]
    }


async def test_info_tells_the_servers_limits(engine: SglangEngine) -> None:
    info = await engine.info()
    assert info.name == "sglang"
    assert info.vocab_size == SHAPE.vocab_size
    assert info.context_length == 4096
    assert 4000 < info.max_input_tokens < 4096
    assert info.max_running_requests == 32
    assert await engine.ready()


async def test_a_server_without_cuda_is_forked_from_one_import(launcher: SglangLauncher) -> None:
    # Children that were spawned instead would come with multiprocessing's resource tracker.
    assert launcher.pid is not None
    assert sorted(command(pid).strip() for pid in children(launcher.pid)) == [
        "sglang::detokenizer",
        "sglang::scheduler",
    ]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.4, "temperature": 1.3}, {"temperature": 0.0}]
)
async def test_logprobs_are_those_of_the_draw(engine: SglangEngine, models: Models, sampling: dict[str, Any]) -> None:
    await reload(engine, models.random[0], "2.0")
    samples = await engine.generate(group(4, 6, **sampling))
    assert [sample.sample_index for sample in samples] == [0, 1, 2, 3]
    for sample in samples:
        assert sample.output_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        expected = reference_logprobs(models.random[0], sample.output_ids, **sampling)
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-4)


def reference_logprobs(
    model: Path,
    output_ids: npt.NDArray[np.int32],
    prompt: npt.NDArray[np.int32] = PROMPT,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> npt.NDArray[np.float64]:
    """Reference logprobs by definition, from transformers' logits: scale, cut off, renormalise."""
    logits = reference_logits(model, output_ids, prompt)
    if temperature == 0:
        return np.where(logits.argmax(-1) == output_ids, 0.0, -np.inf)
    expected = []
    for row, token in zip(logits / temperature, output_ids, strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        kept = order[: top_k or len(order)]
        before = np.cumsum(p[kept]) - p[kept]  # mass of the likelier tokens
        kept = kept[before <= top_p]
        expected.append(np.log(p[token] / p[kept].sum()) if token in kept else -np.inf)
    return np.array(expected)


def reference_logits(
    model: Path, output_ids: npt.NDArray[np.int32], prompt: npt.NDArray[np.int32] = PROMPT
) -> npt.NDArray[np.float64]:
    """[t, vocabulary] in front of each of the tokens."""
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate([prompt, output_ids])).long()[None]
    with torch.no_grad():
        logits: npt.NDArray[np.float64] = network(ids).logits[0, len(prompt) - 1 : -1].double().numpy()
    return logits


async def test_columns_are_those_of_the_draw_also_over_a_weight_update_and_an_abort(
    engine: SglangEngine, models: Models
) -> None:
    made_by = {"12.0": models.random[0], "12.1": models.random[1]}
    await reload(engine, made_by["12.0"], "12.0")
    # Now and then such a model draws the end of the sequence: of so many some live until they are aborted.
    asked = group(8, 3000, top_p=0.6, columns=("sampling_mask", "entropy", "top_logprobs_4"))
    without = group(1, 3000, top_p=0.6)
    work = asyncio.create_task(engine.generate([*asked, *without]))
    # What comes after them in the server's queue has its tokens, so they have new ones too.
    await engine.generate(group(1, 3))
    await reload(engine, made_by["12.1"], "12.1")
    await engine.generate(group(1, 3))
    await engine.abort([request.rid for request in (*asked, *without)])
    *samples, plain = await work
    assert plain.columns == {}
    assert ["12.0", "12.1"] in [[span.version_label for span in sample.spans] for sample in samples]
    assert "abort" in [sample.finish_reason for sample in samples]
    for sample in samples:
        mask = mask_of(sample)
        assert len(mask) == len(sample.output_ids)
        assert mask.counts.min() >= 1
        assert mask.holds(sample.output_ids)
        assert mask.counts.max() < SHAPE.vocab_size
        entropy = values_of(sample, "entropy", "entropy")
        top, top_ids = (values_of(sample, "top_logprobs_4", name) for name in ("top_logprobs", "top_ids"))
        assert (len(entropy), top.shape, top_ids.dtype) == (len(mask), (len(mask), 4), np.int32)
        for span in sample.spans:
            logits = reference_logits(made_by[span.version_label], sample.output_ids)
            for at in range(span.start, span.end):
                start = int(mask.counts[:at].sum())
                kept = mask.values[start : start + mask.counts[at]]
                p = np.exp(logits[at] - logits[at].max())
                drawn = p[kept] / p[kept].sum()
                assert p[sample.output_ids[at]] / p[kept].sum() == pytest.approx(np.exp(sample.logprobs[at]), rel=1e-3)
                assert entropy[at] == pytest.approx(-np.sum(drawn * np.log(drawn)), rel=1e-3, abs=1e-4)
                # The likeliest tokens are those before sampling is narrowed.
                assert np.exp(top[at]) == pytest.approx(np.sort(p)[:-5:-1] / p.sum(), rel=1e-3)
                assert p[top_ids[at]] / p.sum() == pytest.approx(np.exp(top[at]), rel=1e-3)


async def test_penalties_and_bounds_hold_and_logprobs_are_those_after_them(
    engine: SglangEngine, models: Models
) -> None:
    await reload(engine, models.random[0], "13.0")
    (sample,) = await engine.generate(group(1, 40, repetition_penalty=1.8, temperature=0.7))
    logits = reference_logits(models.random[0], sample.output_ids)
    for at, token in enumerate(sample.output_ids):
        seen = list(set(sample.output_ids[:at].tolist()))
        row = logits[at].copy()
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.8, row[seen] * 1.8)
        row /= 0.7
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert sample.logprobs[at] == pytest.approx(expected, abs=1e-3)
    stops = tuple(range(SHAPE.vocab_size - 9))
    for late in await engine.generate(group(4, 40, min_new_tokens=5, stop_token_ids=stops)):
        assert late.finish_reason == "stop"
        assert 6 <= len(late.output_ids) < 40


async def test_a_stop_token_ends_the_sample_and_is_its_last_token(engine: SglangEngine, models: Models) -> None:
    await reload(engine, models.constant[0], "3.0")
    (stopped,) = await engine.generate(
        [SampleRequest(sample_index=0, input_ids=PROMPT, max_new_tokens=9, stop_token_ids=(100,))]
    )
    assert (stopped.output_ids.tolist(), stopped.finish_reason) == ([100], "stop")
    (cut,) = await engine.generate(group(1, 9))
    assert (cut.output_ids.tolist(), cut.finish_reason) == ([100] * 9, "length")
    assert EOS_ID not in cut.output_ids


async def test_a_stop_string_ends_the_sample_and_its_tokens_are_kept(engine: SglangEngine, models: Models) -> None:
    await reload(engine, models.constant[0], "3.1")
    text = AutoTokenizer.from_pretrained(models.constant[0]).decode([100, 100])
    (stopped,) = await engine.generate(group(1, 9, stop=(text,)))
    assert (stopped.output_ids.tolist(), stopped.finish_reason) == ([100, 100], "stop")


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_every_token_names_the_version_that_made_it(
    engine: SglangEngine, models: Models, mode: PauseMode
) -> None:
    await reload(engine, models.constant[0], "4.0", mode)
    work = asyncio.create_task(engine.generate(group(8, 1500)))
    await until_running(engine, 8)
    await reload(engine, models.constant[1], "4.1", mode)
    await reload(engine, models.constant[2], "4.2", mode)
    samples = await work
    truth = set(zip(CONSTANT_TOKENS, ("4.0", "4.1", "4.2"), strict=True))
    assert versions_by_token(samples) <= truth
    for sample in samples:
        assert (len(sample.output_ids), sample.finish_reason) == (1500, "length")
        assert sample.spans[0].version_label == "4.0"
        assert sample.spans[-1].version_label == "4.2"
    assert await engine.loaded_version() == "4.2"


async def test_after_an_in_place_reload_new_requests_do_not_build_on_old_caches(
    engine: SglangEngine, models: Models
) -> None:
    prompt = np.arange(10, 210, dtype=np.int32)
    await reload(engine, models.random[0], "5.0")
    await engine.generate(group(1, 1, prompt))  # leaves the prompt in the prefix cache
    # An engine at work cannot drop its caches whole. Of so many some are at work for as long as the test needs it.
    work = group(6, 3000)
    busy = asyncio.create_task(engine.generate(work))
    await engine.generate(group(1, 3))
    await reload(engine, models.random[1], "5.1", PauseMode.IN_PLACE)
    samples = await engine.generate(group(8, 1, prompt))
    assert not busy.done()
    await engine.abort([request.rid for request in work])
    await busy
    for sample in samples:
        expected = reference_logprobs(models.random[1], sample.output_ids, prompt)
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-4)


async def test_abort_hands_over_what_was_generated(engine: SglangEngine, models: Models) -> None:
    await reload(engine, models.constant[0], "6.0")
    requests = group(2, 3000)
    work = asyncio.create_task(engine.generate(requests))
    await until_running(engine, 2)
    await engine.abort([request.rid for request in requests])
    for sample in await work:
        assert sample.finish_reason == "abort"
        assert not sample.aborted_in_queue
        assert 1 <= len(sample.output_ids) < 3000
        assert len(sample.logprobs) == len(sample.output_ids) == sample.spans[-1].end


async def test_a_pause_that_aborts_ends_what_runs_and_holds_what_comes(engine: SglangEngine, models: Models) -> None:
    await reload(engine, models.constant[0], "7.0")
    work = asyncio.create_task(engine.generate(group(2, 3000)))
    await until_running(engine, 2)
    await engine.pause(PauseMode.ABORT)
    assert [sample.finish_reason for sample in await work] == ["abort", "abort"]
    assert not await engine.ready()
    held = asyncio.create_task(engine.generate(group(1, 3)))
    await engine.load_files(models.constant[1], "7.1")
    assert not held.done()
    await engine.resume()
    assert versions_by_token(await held) == {(101, "7.1")}


async def test_a_deadline_brings_back_what_there_is(engine: SglangEngine, models: Models) -> None:
    await reload(engine, models.constant[0], "8.0")
    (sample,) = await engine.generate(group(1, 4000), deadline_s=0.5)
    assert sample.finish_reason == "abort"
    assert len(sample.output_ids) >= 1


async def test_cancelling_frees_the_engine_at_once(engine: SglangEngine, models: Models) -> None:
    await reload(engine, models.constant[0], "9.0")
    work = asyncio.create_task(engine.generate(group(4, 4000)))
    await until_running(engine, 4)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    # By itself the server looks for clients that left every four seconds.
    await until_running(engine, 0, within_s=3)


async def test_an_impossible_token_id_is_refused_before_the_server_sees_it(engine: SglangEngine) -> None:
    bad = np.array([5, SHAPE.vocab_size], dtype=np.int32)
    with pytest.raises(InvalidField, match="token id 512"):
        await engine.generate([SampleRequest(sample_index=0, input_ids=bad, max_new_tokens=2)])
    assert len(await engine.generate(group(1, 2))) == 1


@pytest.mark.parametrize("damage", ["absent", "cut short", "tensor missing", "other shape"])
async def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving(
    engine: SglangEngine, models: Models, tmp_path: Path, damage: str
) -> None:
    from safetensors.numpy import load_file, save_file

    await reload(engine, models.constant[0], "10.0")
    directory = tmp_path / "bad"
    shutil.copytree(models.constant[1], directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if damage == "absent":
        shutil.rmtree(directory)
    elif damage == "cut short":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "tensor missing":
        del tensors["model.norm.weight"]
        save_file(tensors, file)
    else:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
        save_file(tensors, file)
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(EngineLoadFailed) as failed:
        await engine.load_files(directory, "10.1")
    await engine.resume()
    assert failed.value.weights == "kept"
    assert await engine.loaded_version() == "10.0"
    assert versions_by_token(await engine.generate(group(1, 2))) == {(100, "10.0")}


async def test_a_refusal_by_the_server_itself_is_told_apart_and_survived(
    engine: SglangEngine, models: Models, tmp_path: Path
) -> None:
    await reload(engine, models.constant[0], "11.0")
    # Readable here when it is checked, gone when the server looks: what a retention that is too eager would do.
    vanishing = tmp_path / "vanishing"
    shutil.copytree(models.constant[1], vanishing)
    original = engine._calls.post

    async def post_after_removal(path: str, *args: object, **kwargs: object) -> object:
        if path == "/update_weights_from_disk":
            shutil.rmtree(vanishing)
        return await original(path, *args, **kwargs)  # type: ignore[arg-type]

    engine._calls.post = post_after_removal  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineLoadFailed) as failed:
        await engine.load_files(vanishing, "11.1")
    assert failed.value.weights == "kept"
    assert await engine.loaded_version() == "11.0"
    assert versions_by_token(await engine.generate(group(1, 2))) == {(100, "11.0")}
