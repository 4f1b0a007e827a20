"""Prefix caches across updates: which weights' cache the calls of one group name, turn by turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout_workers.engine.sglang.hosts import host_at
from rollout_workers.engine.types import SampleRequest
from rollout_workers.engines import open_slot
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.engine_calls import EngineCalls
from rollout_workers.generation.samples import GroupProgress
from tests.engine.fake_sglang import FakeSglang, answer, asks_vocabulary, ok
from tests.support.tiny_model import write_random_model
from tests.workers.building import lease, options, task

PROMPT = np.array([3, 4, 5], np.int32)


async def two_turns_around_a_load(
    server: FakeSglang, tmp_path: Path, prefix_cache: str, loads: Sequence[str]
) -> tuple[list[str], GroupProgress]:
    """Keys of the calls of one group, a call before and after each load."""

    async def generate(body: Any) -> web.StreamResponse:
        if body.get("token_ids_logprob"):
            return await asks_vocabulary(body)
        span = {"version": server.version, "start": 0, "end": 2}
        ends = {"finish_reason": {"type": "abort"}, "weight_versions": [span], "cached_tokens": 2}
        return ok([answer(rid, [1, 2], **ends) for rid in body["rid"]])

    server.handlers["/generate"] = generate
    weights = write_random_model(tmp_path / "model")
    given = options("x:1", tmp_path, simulated=None, engine_urls=(server.url,), prefix_cache=prefix_cache, stream=False)
    host = host_at(server.url, given)
    slot = await open_slot("e0", host)
    server.received["/generate"].clear()
    slot.adopt(slot.loaded)
    progress = GroupProgress(lease(task(group_size=1)), PROMPT)
    calls = EngineCalls(progress, slot, Attempts(3))
    for load in (*loads, None):
        assert await calls.make([SampleRequest(sample_index=0, input_ids=PROMPT, max_new_tokens=6)], 5.0) == {}
        if load is not None:
            await slot.engine.load_files(weights, load)
    await host.close()
    return [body["extra_key"][0].partition("/")[2] for body in server.received["/generate"]], progress


@pytest.mark.parametrize(
    ("prefix_cache", "keys"),
    [("version", ["own", "1.1", "1.2"]), ("group", ["own", "own", "own"])],
)
async def test_turns_of_a_group_name_the_cache_that_its_policy_lets_them_use(
    tmp_path: Path, prefix_cache: str, keys: list[str]
) -> None:
    async with FakeSglang() as server:
        server.version = "own"
        named, progress = await two_turns_around_a_load(server, tmp_path, prefix_cache, ["1.1", "1.2"])
    assert named == keys
    assert progress.cached == 6
    assert progress.oldest is not None
    assert progress.oldest.label == "1.0"
