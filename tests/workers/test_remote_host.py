"""A server that somebody else runs, and starts anew as they like."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from buffer_wire.connection.retry import Backoff
from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.sglang.hosts import host_at
from rollout_workers.engine.types import SampleRequest
from rollout_workers.engines import open_slot
from rollout_workers.fleet import guard
from rollout_workers.fleet.guard import EngineGuard
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.engine_calls import EngineCalls
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.engine_state import Event
from tests.engine.fake_sglang import FakeSglang, answer, asks_vocabulary, event, ok, refused
from tests.workers.building import eventually, lease, options, task

PROMPT = np.array([3, 4, 5], np.int32)


def six_tokens() -> SampleRequest:
    return SampleRequest(sample_index=0, input_ids=PROMPT, max_new_tokens=6)


def streaming(server: FakeSglang) -> None:
    """Have it answer with tokens 1 to 6 in three events, in the form that its flag asks for."""

    async def generate(body: Any) -> web.StreamResponse:
        if body.get("token_ids_logprob"):
            return await asks_vocabulary(body)
        (rid,), events = body["rid"], []
        for upto in (2, 4, 6):
            tokens = list(range(upto - 1 if server.incremental else 1, upto + 1))
            end = {"weight_versions": [{"version": server.version, "start": 0, "end": 6}]}
            meta = end if upto == 6 else {"finish_reason": None}
            events.append(event({**answer(rid, tokens, completion_tokens=upto, **meta), "index": 0}))
        return web.Response(body=b"".join(events) + b"data: [DONE]\n\n", content_type="text/event-stream")

    server.handlers["/generate"] = generate


@pytest.mark.parametrize("incremental", [True, False])
async def test_server_that_comes_back_with_other_flags_is_read_by_them(tmp_path: Path, incremental: bool) -> None:
    async with FakeSglang() as server:
        streaming(server)
        server.incremental = incremental
        host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        first = await host.open()
        assert (await first.generate([six_tokens()]))[0].output_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert await host.revive() is first, "the same server is not connected anew: its calls go on"
        server.incremental = not incremental
        server.start_anew()
        (sample,) = await (await host.revive()).generate([six_tokens()])
        assert (sample.output_ids.tolist(), sample.fault) == ([1, 2, 3, 4, 5, 6], "")
        with pytest.raises(EngineUnavailable, match="closed"):
            await first.generate([six_tokens()])
        await host.close()


async def test_server_that_was_started_anew_unnoticed_is_found_out_by_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "PROBE_S", 600.0)
    async with FakeSglang() as server:
        streaming(server)
        server.version = "default"
        host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        slot = await open_slot("e0", host)
        slot.adopt(slot.loaded)
        running = asyncio.create_task(EngineGuard(slot, host, [slot], timeout_s=60.0).run())
        progress = GroupProgress(lease(task(group_size=1)), PROMPT)
        calls = EngineCalls(progress, slot, Attempts(3))

        # With the weights that it had, and no call under way that could have failed.
        server.incremental = True
        server.start_anew()
        first = slot.engine
        assert list(await calls.make([six_tokens()], 5.0)) == [0]
        assert len(progress.samples[0]) == 0
        await eventually(lambda: slot.reachable and slot.engine is not first)
        assert not slot.leasable, "until it is brought to the published version"
        assert await calls.make([six_tokens()], 5.0) == {}
        assert progress.samples[0].output_ids.tolist() == [1, 2, 3, 4, 5, 6]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await host.close()


async def test_server_that_does_not_tell_its_weights_is_unreachable_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_BACKOFF", Backoff(first_s=0.01, ceiling_s=0.02))

    async def says_nothing(body: Any) -> web.StreamResponse:
        return ok({})

    async with FakeSglang() as server:
        host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        slot = await open_slot("e0", host)
        running = asyncio.create_task(EngineGuard(slot, host, [slot], timeout_s=60.0).run())
        tells, server.handlers["/model_info"] = server.handlers["/model_info"], says_nothing
        slot.move(Event.SUSPECTED)
        await eventually(lambda: "no weight_version" in slot.last_error)
        assert not slot.reachable
        server.handlers["/model_info"] = tells
        await eventually(lambda: slot.reachable)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await host.close()


async def test_server_that_a_killed_worker_left_paused_is_resumed(tmp_path: Path) -> None:
    async with FakeSglang() as server:

        async def ready(body: Any) -> web.StreamResponse:
            resumed = "/continue_generation" in server.order
            return ok() if resumed else refused("paused", 503)

        server.handlers["/ready"] = ready
        host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        engine = await host.open()
        assert await engine.ready()
        await host.close()


async def test_update_that_a_killed_worker_left_open_is_closed(tmp_path: Path) -> None:
    async with FakeSglang() as server:
        server.session_open = True
        host = host_at(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        await (await host.open()).info()
        assert not server.session_open
        await host.close()


async def test_server_that_does_not_become_ready_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async with FakeSglang() as server:

        async def never(body: Any) -> web.StreamResponse:
            return refused("still loading", 503)

        server.handlers["/ready"] = never
        made = options("x:1", tmp_path, simulated=None, engine_urls=(server.url,), engine_timeout_s=0.3)
        host = host_at(server.url, made)
        with pytest.raises(EngineUnavailable, match=r"not ready after 0\.3 s"):
            await host.open()
        await host.close()
