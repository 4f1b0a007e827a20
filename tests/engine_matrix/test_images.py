"""Images to a real SGLang server with a tiny GLM-4V, beside the log-probabilities that transformers computes."""

import io
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from PIL import Image
from transformers import AutoImageProcessor

from examples.vision.model import IDS, IMAGE, build_model, save
from rollout_workers.engine.errors import EngineMalformed
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import PauseMode, PromptImage, SampleRequest
from tests.support.sglang_python import real_sglang
from trainer_client.collate.images import processor_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

VIDEO = IDS["<|video|>"]
START, STOP = IDS["<|begin_of_image|>"], IDS["<|end_of_image|>"]
PROMPT = np.array([1, START, *[IMAGE] * 4, STOP, 20, START, *[IMAGE] * 6, STOP, 21, 2], np.int32)
"""Two images, of 4 and of 6 tokens."""
PLACES, SIZES = ((2, 4), (9, 6)), ((56, 56), (84, 56))

Logprobs = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    at = tmp_path_factory.mktemp("vision")
    for seed in range(2):
        save(build_model(seed), at / str(seed))
    return [at / "0", at / "1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptImage, ...]:
    at = tmp_path_factory.mktemp("images")
    made = []
    for i, ((start, tokens), size) in enumerate(zip(PLACES, SIZES, strict=True)):
        out = io.BytesIO()
        noise = np.random.default_rng(i).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(noise).save(out, "PNG")
        (at / str(i)).write_bytes(out.getvalue())
        made.append(PromptImage(sha256(out.getvalue()).hexdigest(), "", at / str(i), start, tokens))
    return tuple(made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangEngine]:
    async with real_sglang(models[0], tmp_path_factory.mktemp("sglang")) as launcher:
        made = SglangEngine(launcher.base_url)
        await made.info()
        yield made
        await made.close()


def judge(model: Path, images: Sequence[PromptImage]) -> Callable[[npt.NDArray[np.int32]], Logprobs]:
    """Log-probabilities of the tokens behind the prompt by transformers, without the placeholder that is not drawn."""
    seed, process = int(model.name), processor_of(AutoImageProcessor.from_pretrained(model))  # type: ignore[no-untyped-call]
    network, made = build_model(seed), [process(image.path.read_bytes()) for image in images]
    inputs = {name: torch.cat([each[name] for each in made]) for name in made[0]}

    def logprobs(ids: npt.NDArray[np.int32]) -> Logprobs:
        tokens = torch.from_numpy(ids).long()[None]
        with torch.no_grad():
            logits = network(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), **inputs).logits[0]
        logits[:, IMAGE] = -torch.inf
        every = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
        drawn: Logprobs = every.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].numpy()
        return drawn

    return logprobs


def request(index: int, images: tuple[PromptImage, ...], *, ids: npt.NDArray[np.int32] = PROMPT) -> SampleRequest:
    return SampleRequest(sample_index=index, input_ids=ids, max_new_tokens=6, ignore_eos=True, images=images)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_sees_the_images_that_are_trained_over_calls_and_a_load(
    engine: SglangEngine, models: list[Path], images: tuple[PromptImage, ...]
) -> None:
    for seed, model in enumerate(models):
        if seed:
            await engine.pause(PauseMode.RETRACT)
            await engine.load_files(model, "1.1")
            await engine.resume()
        right = judge(model, images)
        first = await engine.generate([request(i, images) for i in range(4)])
        for sample in first:
            ids = np.concatenate([PROMPT, sample.output_ids])
            np.testing.assert_allclose(sample.logprobs, right(ids), atol=2e-3)
            assert IMAGE not in sample.output_ids
        # A partial rollout goes on from what was made, with the same images; SGLang takes none with a video's place.
        begun = next(sample.output_ids for sample in first if VIDEO not in sample.output_ids)
        ids = np.concatenate([PROMPT, begun])
        (rest,) = await engine.generate([request(0, images, ids=ids)])
        whole = np.concatenate([ids, rest.output_ids])
        np.testing.assert_allclose(rest.logprobs, right(whole)[len(begun) :], atol=2e-3)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_with_another_number_of_placeholders_is_not_used(
    engine: SglangEngine, images: tuple[PromptImage, ...]
) -> None:
    short = np.delete(PROMPT, 3)
    fewer = (PromptImage(*_values(images[0]), 2, 3), PromptImage(*_values(images[1]), 8, 6))
    with pytest.raises(EngineMalformed, match=f"saw {len(PROMPT)} input tokens in place of {len(short)}"):
        await engine.generate([request(0, fewer, ids=short)])


def _values(image: PromptImage) -> tuple[str, str, Path]:
    return image.sha256, image.location, image.path
