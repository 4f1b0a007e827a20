"""Adapters at a server that speaks SGLang's wire format, as its source has it: a CPU's SGLang is not asked here."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_workers.engine.errors import EngineLoadFailed, EngineUnavailable
from rollout_workers.engine.sglang.adapter_files import check_adapter
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import GeneratedSample, PauseMode
from rollout_workers.engine.weight_files import UnloadableWeights
from tests.engine.against_fake import QUICK, connected, request
from tests.engine.fake_sglang import FakeSglang, answer, ok
from tests.support.adapters import write_adapter

LAYER = "model.layers.0.self_attn.q_proj"


@asynccontextmanager
async def serving(
    most: int = 2, *, stream: bool = True, **settings: Any
) -> AsyncIterator[tuple[FakeSglang, SglangEngine]]:
    async with FakeSglang() as fake:
        fake.most_adapters, fake.incremental = most, True
        for name, value in settings.items():
            setattr(fake, name, value)
        async with connected(fake, replace(QUICK, stream=stream)) as engine:
            yield fake, engine


class Held:
    """Requests that the server answers when they are aborted, with two tokens."""

    def __init__(self, fake: FakeSglang) -> None:
        self.begun = asyncio.Event()
        self._ended = asyncio.Event()
        fake.handlers["/generate"] = self._generate
        fake.handlers["/abort_request"] = self._abort

    async def _generate(self, body: Any) -> web.StreamResponse:
        self.begun.set()
        await self._ended.wait()
        spans = [{"version": "1.0", "start": 0, "end": 2}]
        ends = {"finish_reason": {"type": "abort", "message": ""}, "completion_tokens": 2, "weight_versions": spans}
        return ok([answer(rid, [7, 8], **ends) for rid in body["rid"]])

    async def _abort(self, body: Any) -> web.StreamResponse:
        self._ended.set()
        return ok()


def labels(sample: GeneratedSample) -> list[tuple[str, int, int]]:
    return [(span.version_label, span.start, span.end) for span in sample.spans]


async def test_requests_run_under_the_adapter_in_force_and_bear_its_label(tmp_path: Path) -> None:
    async with serving() as (fake, engine):
        (before,) = await engine.generate([request()])
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        (after,) = await engine.generate([request()])
        assert await engine.loaded_version() == "1.1"
        await engine.drop_adapter()
        (without,) = await engine.generate([request()])
        assert [labels(sample) for sample in (before, after, without)] == [
            [("1.0", 0, 2)], [("1.1", 0, 2)], [("1.0", 0, 2)]
        ]  # fmt: skip
        assert [body.get("lora_path") for body in fake.received["/generate"]] == [None, ["1.1"], None]
        assert fake.received["/load_lora_adapter"] == [{"lora_name": "1.1", "lora_path": str(tmp_path / "a")}]
        assert "/pause_generation" not in fake.order


async def test_request_goes_on_under_the_adapter_with_which_it_began(tmp_path: Path) -> None:
    async with serving(most=3) as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        held = Held(fake)
        running = request()
        making = asyncio.create_task(engine.generate([running]))
        await held.begun.wait()
        await engine.load_adapter(write_adapter(tmp_path / "b", LAYER), "1.2")
        assert list(fake.adapters) == ["1.1", "1.2"]  # One of them is in use, the other in force.
        await engine.abort([running.rid])
        (sample,) = await making
        assert labels(sample) == [("1.1", 0, 2)]
        await engine.load_adapter(write_adapter(tmp_path / "c", LAYER), "1.3")
        assert list(fake.adapters) == ["1.3"]


async def test_room_for_a_new_adapter_ends_the_requests_under_the_oldest(tmp_path: Path) -> None:
    async with serving(most=2) as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        held = Held(fake)
        making = asyncio.create_task(engine.generate([request()]))
        await held.begun.wait()
        await engine.load_adapter(write_adapter(tmp_path / "b", LAYER), "1.2")
        assert not making.done()
        await engine.load_adapter(write_adapter(tmp_path / "c", LAYER), "1.3")
        (sample,) = await making
        assert (sample.finish_reason, labels(sample)) == ("abort", [("1.1", 0, 2)])
        assert list(fake.adapters) == ["1.3"]


async def test_other_weights_end_what_runs_under_an_adapter_whatever_the_pause(tmp_path: Path) -> None:
    async with serving() as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        held = Held(fake)
        making = asyncio.create_task(engine.generate([request()]))
        await held.begun.wait()
        await engine.pause(PauseMode.IN_PLACE)
        (sample,) = await making
        assert labels(sample) == [("1.1", 0, 2)]
        assert fake.received["/pause_generation"] == [{"mode": "abort"}]


async def test_tokens_of_an_adapter_on_other_weights_than_its_base_are_not_used(tmp_path: Path) -> None:
    async with serving() as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")

        async def generate(body: Any) -> web.StreamResponse:
            spans = [{"version": "1.0", "start": 0, "end": 1}, {"version": "9.9", "start": 1, "end": 2}]
            return ok([answer(body["rid"][0], [7, 8], weight_versions=spans), answer(body["rid"][1], [7, 8])])

        fake.handlers["/generate"] = generate
        mixed, whole = await engine.generate([request(), request(sample_index=1)])
        assert "adapter 1.1 on weights ['1.0', '9.9'], and it goes onto 1.0" in mixed.fault
        assert labels(whole) == [("1.1", 0, 2)]


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_server_that_was_started_anew_has_no_adapter_and_is_suspected(tmp_path: Path, stream: bool) -> None:
    async with serving(stream=stream) as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        fake.start_anew(version="1.0")
        assert await engine.loaded_version() == "1.0"
        with pytest.raises(EngineUnavailable, match="it has lost its adapter: Got LoRA adapter that has never"):
            await engine.generate([request()])


async def test_adapters_that_a_killed_worker_left_are_unloaded_by_the_next(tmp_path: Path) -> None:
    left = {"1.7": "/old", "1.8": "/old", "somebody's": "/theirs"}
    async with serving(adapters=left) as (fake, engine):
        assert list(fake.adapters) == ["somebody's"]
        # A load that was under way when it was killed is done only now.
        fake.adapters["1.8"] = "/old"
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.8")
        assert fake.adapters == {"somebody's": "/theirs", "1.8": str(tmp_path / "a")}


async def test_refused_load_leaves_the_adapter_before_in_force(tmp_path: Path) -> None:
    async with serving() as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        refusal = {"success": False, "error_message": "LoRA adapter 1.2 with rank 64 is incompatible"}

        async def refuse(body: Any) -> web.StreamResponse:
            return web.json_response(refusal, status=400)

        fake.in_turn("/load_lora_adapter", refuse, fake.handlers["/load_lora_adapter"])
        with pytest.raises(EngineLoadFailed, match="with rank 64 is incompatible") as raised:
            await engine.load_adapter(write_adapter(tmp_path / "b", LAYER), "1.2")
        assert raised.value.weights == "kept"
        assert await engine.loaded_version() == "1.1"
        await engine.load_adapter(tmp_path / "b", "1.2")
        assert await engine.loaded_version() == "1.2"


@pytest.mark.parametrize("most", [0, 1])
async def test_server_that_cannot_hold_two_says_which_flags_are_missing(tmp_path: Path, most: int) -> None:
    async with serving(most=most) as (fake, engine):
        with pytest.raises(EngineLoadFailed, match=f"it holds {most} adapters at once.*--enable-lora"):
            await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        assert fake.received["/load_lora_adapter"] == []


async def test_requests_that_do_not_end_keep_the_new_adapter_out(tmp_path: Path) -> None:
    async with serving(most=2) as (fake, engine):
        await engine.load_adapter(write_adapter(tmp_path / "a", LAYER), "1.1")
        held = Held(fake)
        fake.handlers["/abort_request"] = ignores
        making = asyncio.create_task(engine.generate([request()]))
        await held.begun.wait()
        await engine.load_adapter(write_adapter(tmp_path / "b", LAYER), "1.2")
        with pytest.raises(EngineLoadFailed, match=r"requests under 1\.1 do not end, and it holds 2"):
            await engine.load_adapter(write_adapter(tmp_path / "c", LAYER), "1.3")
        assert await engine.loaded_version() == "1.2"
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


async def ignores(body: Any) -> web.StreamResponse:
    return ok()


# --- files --------------------------------------------------------------------------------------------------------

MODEL = {f"{LAYER}.weight": (8, 4), "model.layers.0.mlp.experts.0.up.weight": (4, 4)}


def test_adapter_of_the_model_is_taken(tmp_path: Path) -> None:
    check_adapter(write_adapter(tmp_path / "a", LAYER, out=8, into=4), MODEL)
    # Files and modules of a model that sees, too, name what is above the layers differently.
    check_adapter(write_adapter(tmp_path / "b", f"model.language_{LAYER}", out=8, into=4), MODEL)
    check_adapter(write_adapter(tmp_path / "c", "model.layers.0.mlp.experts", out=9, into=9), MODEL)


@pytest.mark.parametrize(
    ("layer", "out", "why"),
    [
        (LAYER.replace("0", "7"), 8, r"the engine's model has no model\.layers\.7\.self_attn\.q_proj"),
        (LAYER, 16, r"q_proj is \[16, 4\], the engine's \(8, 4\)"),
    ],
)
def test_adapter_of_another_model_is_refused_by_its_headers(tmp_path: Path, layer: str, out: int, why: str) -> None:
    with pytest.raises(UnloadableWeights, match=why):
        check_adapter(write_adapter(tmp_path / "a", layer, out=out, into=4), MODEL)


def test_what_is_no_whole_adapter_is_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", LAYER, out=8, into=4)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content, why in [
        (whole[:-4], "its header promises"),
        (whole.replace(b"lora_B", b"lora_C"), "is no tensor of a LoRA adapter$"),
        # PEFT's copy of an embedding that the adapter changes.
        (whole.replace(b"q_proj.lora_B.weight", b"q0.base_layer.weight"), "save_embedding_layers=False"),
    ]:
        weights.write_bytes(content)
        with pytest.raises(UnloadableWeights, match=why):
            check_adapter(directory, MODEL)
    weights.write_bytes(whole)
    (directory / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UnloadableWeights, match=r"adapter_model\.bin, and adapters are safetensors alone"):
        check_adapter(directory, MODEL)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(UnloadableWeights, match="peft_type 'IA3'"):
        check_adapter(directory, MODEL)


@pytest.mark.parametrize(
    "setting",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"alora_invocation_tokens": [7]},
    ],
)
def test_what_the_server_would_leave_out_of_an_adapters_settings_is_refused(
    tmp_path: Path, setting: dict[str, object]
) -> None:
    # SGLang multiplies by lora_alpha / r, whatever else the settings say.
    directory = write_adapter(tmp_path / "a", LAYER, out=8, into=4)
    path = directory / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, **{name: type(value)() for name, value in setting.items()}}))
    check_adapter(directory, MODEL)
    path.write_text(json.dumps({**settings, **setting}))
    with pytest.raises(UnloadableWeights, match=next(iter(setting))):
        check_adapter(directory, MODEL)


def test_half_of_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnloadableWeights, match="has lora_A and not the other half"):
        check_adapter(write_adapter(tmp_path / "a", LAYER, halves="A"), None)
