"""VllmEngine against a stub of vLLM's wire format: no real vLLM was at hand. What it sends, reads and refuses."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from buffer_wire.engine_columns import SAMPLING_MASK
from buffer_wire.errors import InvalidField
from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import (
    EngineLoadFailed,
    EngineMalformed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnfit,
)
from rollout_workers.engine.registry import KINDS
from rollout_workers.engine.types import GeneratedSample, PauseMode, ProcessGroup, SampleRequest
from rollout_workers.engine.vllm.engine import VllmEngine
from rollout_workers.engines import open_slot
from rollout_workers.versions import Version
from tests.engine.fake_vllm import VOCABULARY, FakeVllm, choice, event, refused
from tests.support.tiny_model import write_safetensors
from tests.workers.building import eventually, options

QUICK = ServerOptions(control_timeout_s=2, generate_timeout_s=5, abort_grace_s=0.3, reconnect_s=0.3, stream_interval=2)
PLAIN = ServerOptions(control_timeout_s=2, generate_timeout_s=5, abort_grace_s=0.3, reconnect_s=0.3, stream=False)


def asking(tokens: int = 6, **more: Any) -> SampleRequest:
    return SampleRequest(sample_index=0, input_ids=np.array([3, 4, 5], np.int32), max_new_tokens=tokens, **more)


@asynccontextmanager
async def connected(fake: FakeVllm, given: ServerOptions = QUICK) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(fake.url, options=given)
    try:
        async with asyncio.timeout(30):
            yield engine
    finally:
        await engine.close()


def write_model(directory: Path, *, rows: int = 2) -> Path:
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", {"w": np.zeros((rows, 3), np.float32)})
    return directory


def seen(sample: GeneratedSample) -> tuple[list[int], str, str]:
    return sample.output_ids.tolist(), sample.finish_reason, sample.fault


# --- what it says about itself ----------------------------------------------------------------------------------


async def test_what_a_server_does_not_report_is_found_out_by_asking() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        info = await engine.info()
        assert (info.name, info.version, info.vocab_size, info.context_length) == ("vllm", "0.32.0", VOCABULARY, 128)
        assert not info.heeds_seeds
        assert info.max_running_requests == 2 * 48
        fake.others = 4
        load = await engine.load()
        assert (load.running, load.waiting, load.token_usage) == (4, 4, 0.5)
        assert await engine.ready()
        assert await engine.loaded_version() == "default"


@pytest.mark.parametrize(
    "said",
    [
        {"vllm_config": "model='tiny', max_num_seqs=48"},
        {"vllm_config": {"scheduler_config": {"max_num_seqs": None}, "parallel_config": {"data_parallel_size": 1}}},
        {"vllm_config": {"scheduler_config": {"max_num_seqs": "many"}, "parallel_config": {"data_parallel_size": 1}}},
        {"vllm_config": {}},
        None,
    ],
)
async def test_server_that_does_not_say_how_many_requests_it_runs_is_taken_for_a_usual_one(said: Any) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        if said is None:
            del fake.handlers["/server_info"]
        else:

            async def server_info(_: web.Request, __: Any) -> web.Response:
                return web.json_response(said)

            fake.handlers["/server_info"] = server_info
        assert (await engine.info()).max_running_requests == 256


async def test_server_whose_log_probabilities_are_not_those_of_the_draw_is_refused() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.logprobs_mode = "raw_logprobs"
        with pytest.raises(EngineUnfit, match="--logprobs-mode processed_logprobs"):
            await engine.info()


async def test_server_without_the_endpoints_for_rl_is_refused() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        del fake.handlers["/weight_info"]
        with pytest.raises(EngineUnfit, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.check_version()


async def test_server_that_returns_no_token_ids_is_refused() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        made = fake.handlers["/v1/completions"]

        async def without_ids(request: web.Request, body: Any) -> web.StreamResponse:
            if "logit_bias" in body:
                return await made(request, body)
            return web.json_response({"choices": [choice([1], logprob=0.0, token_ids=None)]})

        fake.handlers["/v1/completions"] = without_ids
        with pytest.raises(EngineUnfit, match="return_token_ids"):
            await engine.info()


async def test_server_that_was_started_anew_has_forgotten_its_label(tmp_path: Path) -> None:
    async with FakeVllm() as fake:
        host = KINDS["vllm"].hosts.host_at(fake.url, _worker(fake, tmp_path))
        engine = await host.open()
        slot = await open_slot("e0", host)
        assert slot.pristine
        await engine.pause(PauseMode.ABORT)
        await engine.load_files(write_model(tmp_path / "new"), "1.2")
        await engine.resume()
        assert await host.revive() is engine
        fake.label = "default"
        assert await host.revive() is not engine
        await host.close()


# --- generation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [QUICK, PLAIN], ids=["streamed", "plain"])
async def test_group_comes_back_with_tokens_log_probabilities_and_the_label_in_force(given: ServerOptions) -> None:
    async with FakeVllm() as fake, connected(fake, given) as engine:
        fake.label = "1.7"
        decoding: list[int] = []
        engine.on_decoding = decoding.append
        one, two = await engine.generate([asking(5), asking(6)])
        assert [seen(one), seen(two)] == [([1, 2, 3, 4, 5], "length", ""), ([1, 2, 3, 4, 5, 6], "length", "")]
        assert one.logprobs.tolist() == [-0.5] * 5
        assert [(span.version_label, span.start, span.end) for span in two.spans] == [("1.7", 0, 6)]
        assert sum(decoding) == 0
        assert max(decoding) == 1
        assert engine.tokens_in_hand == 0


async def test_request_has_every_parameter_and_a_cache_of_its_weights_own() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.label = "1.7"
        request = asking(
            temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1, min_new_tokens=2,
            stop_token_ids=(7,), stop=("end",), ignore_eos=True, seed=3,
        )  # fmt: skip
        await engine.generate([request])
        sent = fake.received["/v1/completions"][-1]
        assert sent == {
            "model": "tiny", "request_id": request.rid, "prompt": [3, 4, 5], "max_tokens": 6, "min_tokens": 2,
            "temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "stop": ["end"],
            "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False, "logprobs": 0,
            "return_token_ids": True, "cache_salt": "1.7", "stream": True, "stream_interval": 2,
            "stream_options": {"include_usage": True},
        }  # fmt: skip


async def test_greedy_choice_is_certain() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        (sample,) = await engine.generate([asking(temperature=0.0)])
        assert sample.logprobs.tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("temperature", {"temperature": 0.001}),
        ("columns", {"columns": (SAMPLING_MASK,), "top_p": 0.9}),
        ("input_ids", {"input_ids": np.array([VOCABULARY], np.int32)}),
    ],
)
async def test_what_the_server_must_not_be_asked_for_is_refused_here(field: str, more: dict[str, Any]) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        with pytest.raises(InvalidField) as caught:
            await engine.generate([SampleRequest(**{**_plain(), **more})])
        assert caught.value.attributes["field"] == field


@pytest.mark.parametrize("given", [QUICK, PLAIN], ids=["streamed", "plain"])
async def test_aborted_request_comes_back_with_what_it_has_and_its_sibling_whole(given: ServerOptions) -> None:
    async with FakeVllm() as fake, connected(fake, given) as engine:
        long, short = asking(100), asking(4)
        running = asyncio.create_task(engine.generate([long, short]))
        await eventually(lambda: list(fake.running) == [f"cmpl-{long.rid}-0"])
        await engine.abort([long.rid])
        first, second = await running
        assert [seen(first), seen(second)] == [([1, 2, 3, 4, 5, 6], "abort", ""), ([1, 2, 3, 4], "length", "")]


async def test_request_that_the_server_does_not_abort_loses_its_connection_and_keeps_its_tokens() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.aborts = False
        request = asking(100)
        running = asyncio.create_task(engine.generate([request]))
        await eventually(lambda: engine.tokens_in_hand == 6)
        await engine.abort([request.rid])
        (sample,) = await running
        assert seen(sample) == ([1, 2, 3, 4, 5, 6], "abort", "")
        await eventually(lambda: fake.disconnected == [f"cmpl-{request.rid}-0"])


async def test_what_runs_at_the_deadline_comes_back_as_it_is() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        (sample,) = await engine.generate([asking(100)], deadline_s=0.3)
        assert seen(sample) == ([1, 2, 3, 4, 5, 6], "abort", "")


async def test_server_that_hands_nothing_over_at_the_deadline_is_late_and_what_arrived_is_kept() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.aborts = False
        with pytest.raises(EngineTimeout) as caught:
            await engine.generate([asking(100)], deadline_s=0.3)
        assert [seen(sample) for sample in caught.value.partial] == [([1, 2, 3, 4, 5, 6], "abort", "")]


async def test_cancelled_call_leaves_nothing_running_and_counts_its_tokens() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        running = asyncio.create_task(engine.generate([asking(100)]))
        await eventually(lambda: engine.tokens_in_hand == 6)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (engine.take_cut_off(), engine.take_cut_off(), engine.tokens_in_hand) == (6, 0, 0)
        await eventually(lambda: not fake.running)


async def test_engine_that_is_given_up_ends_its_calls_with_what_had_arrived() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        running = asyncio.create_task(engine.generate([asking(100)]))
        await eventually(lambda: engine.tokens_in_hand == 6)
        engine.give_up("it is gone")
        with pytest.raises(EngineUnavailable, match="it is gone") as caught:
            await running
        assert len(caught.value.partial[0].output_ids) == 6


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([(choice([1, 2], finish="length"), None), (None, 3)], "2 tokens, and 3 by its own count"),
        ([(choice([1, 2], finish="length", logprobs=None), None)], "0 log-probabilities for 2 tokens"),
        ([(choice([1, 2], finish="repetition"), None)], "finish reason 'repetition'"),
        ([(choice([1, 2], finish="length"), 2)], "cut off after 2 of 6 tokens"),
        ([(choice([1, 2]), None)], "finish reason None"),
        ([(choice([1, 2], logprob=float("-inf"), finish="stop"), None)], "not finite"),
        ([({"index": 0}, None)], "KeyError"),
    ],
)
async def test_answer_that_breaks_the_contract_is_not_used(events: list[Any], fault: str) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        await engine.info()

        async def broken(request: web.Request, body: Any) -> web.StreamResponse:
            said = [event(body, *([one] if one else []), usage=usage) for one, usage in events]
            return web.Response(body=b"".join(said) + b"data: [DONE]\n\n", content_type="text/event-stream")

        fake.handlers["/v1/completions"] = broken
        with pytest.raises(EngineMalformed, match=fault):
            await engine.generate([asking()])


async def test_stream_that_breaks_off_leaves_what_it_brought() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        await engine.info()

        async def breaks_off(request: web.Request, body: Any) -> web.StreamResponse:
            return web.Response(body=event(body, choice([1, 2])), content_type="text/event-stream")

        fake.handlers["/v1/completions"] = breaks_off
        with pytest.raises(EngineUnavailable, match="ended its stream before the end") as caught:
            await engine.generate([asking()])
        assert seen(caught.value.partial[0]) == ([1, 2], "abort", "")


async def test_refusals_come_with_their_status_before_a_stream_and_in_it() -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        await engine.info()

        async def before(request: web.Request, body: Any) -> web.StreamResponse:
            return refused("max_tokens is too large")

        async def within(request: web.Request, body: Any) -> web.StreamResponse:
            error = {"error": {"message": "the engine is dead", "type": "InternalServerError", "code": 500}}
            return web.Response(body=b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")

        for handler, status, message in ((before, 400, "too large"), (within, 500, "is dead")):
            fake.handlers["/v1/completions"] = handler
            with pytest.raises(EngineRejected, match=message) as caught:
                await engine.generate([asking()])
            assert caught.value.status == status


# --- weights ----------------------------------------------------------------------------------------------------


async def test_pause_ends_what_runs_and_holds_new_requests_until_it_goes_on_under_new_weights(tmp_path: Path) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.label = "1.1"
        old = asyncio.create_task(engine.generate([asking(100)]))
        await eventually(lambda: engine.tokens_in_hand == 6)
        await engine.pause(PauseMode.ABORT)
        new, given_up = asyncio.create_task(engine.generate([asking(2)])), asking(2)
        held = asyncio.create_task(engine.generate([given_up]))
        await engine.load_files(write_model(tmp_path / "new"), "1.2")
        await engine.abort([given_up.rid])
        assert (await held)[0].aborted_in_queue
        assert not new.done()
        await engine.resume()
        assert [(s.version_label, s.end) for s in (await old)[0].spans] == [("1.1", 6)]
        assert [(s.version_label, s.end) for s in (await new)[0].spans] == [("1.2", 2)]
        assert fake.received["/v1/completions"][-1]["cache_salt"] == "1.2"
        assert fake.received["/collective_rpc"] == [
            {
                "method": "reload_weights",
                "kwargs": {"weights_path": str((tmp_path / "new").resolve()), "is_checkpoint_format": True},
            }
        ]


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_pause_that_keeps_requests_is_refused(tmp_path: Path, mode: PauseMode) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        with pytest.raises(EngineUnfit, match="do not name the weights"):
            await engine.pause(mode)
        assert not fake.paused
        with pytest.raises(InvalidField, match="abort for vllm"):
            _worker(fake, tmp_path, pause_mode=str(mode))


async def test_load_that_breaks_off_leaves_a_label_under_which_nothing_is_generated(tmp_path: Path) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.label = "1.1"

        async def fails(request: web.Request, body: Any) -> web.Response:
            return web.json_response({"error": "out of memory"}, status=500)

        fake.handlers["/collective_rpc"] = fails
        with pytest.raises(EngineLoadFailed, match="out of memory") as caught:
            await engine.load_files(write_model(tmp_path / "new"), "1.2")
        assert caught.value.weights == "unknown"
        host = KINDS["vllm"].hosts.host_at(fake.url, _worker(fake, tmp_path))
        slot = await open_slot("e0", host)
        assert (slot.loaded, slot.pristine) == (Version(1, 0), False), "it is to be loaded, whatever is published"
        await host.close()


async def test_server_that_knows_no_loads_keeps_its_weights_and_their_label(tmp_path: Path) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.label = "1.1"
        await engine.info()
        del fake.handlers["/collective_rpc"]
        with pytest.raises(EngineLoadFailed) as caught:
            await engine.load_files(write_model(tmp_path / "new"), "1.2")
        assert (caught.value.weights, await engine.loaded_version()) == ("kept", "1.1")


async def test_files_of_another_model_are_refused_before_the_server_is_told(tmp_path: Path) -> None:
    async with FakeVllm() as fake, connected(fake) as engine:
        fake.model_path = str(write_model(tmp_path / "base"))
        await engine.info()
        with pytest.raises(EngineLoadFailed) as caught:
            await engine.load_files(write_model(tmp_path / "other", rows=9), "1.2")
        assert caught.value.weights == "kept"
        assert "/collective_rpc" not in fake.order


async def test_tensors_and_broadcasts_are_not_offered_and_change_nothing(tmp_path: Path) -> None:
    process_group = ProcessGroup(
        group_name="g", backend="nccl", master_address="127.0.0.1", master_port=1, rank=1, world_size=2
    )
    async with FakeVllm() as fake, connected(fake) as engine:
        for call in (
            engine.load_tensors(tmp_path, "1.2"),
            engine.check_tensors([]),
            engine.join_group(process_group, deadline_s=1.0),
            engine.receive([], group_name="g", version_label="1.2", deadline_s=1.0),
        ):
            with pytest.raises(EngineLoadFailed, match="from files alone") as caught:
                await call
            assert caught.value.weights == "kept"
        await engine.leave_group("g")
        assert not fake.order


def _plain() -> dict[str, Any]:
    return {"sample_index": 0, "input_ids": np.array([3], np.int32), "max_new_tokens": 2}


def _worker(fake: FakeVllm, tmp_path: Path, **more: Any) -> Any:
    given = {"engine_urls": (fake.url,), "engine_kind": "vllm", "pause_mode": "abort", **more}
    return options("x:1", tmp_path, simulated=None, **given)
