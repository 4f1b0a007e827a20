"""Rollout functions on an engine that fails, breaks off, or changes its weights under way."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.engine.types import GeneratedSample, PauseMode, SampleRequest
from rollout_workers.episode import Episode
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.slots.engine_state import Event
from rollout_workers.tasks.rollout import SingleTurn
from rollout_workers.versions import Version
from tests.workers.building import eventually, generated, time_passes
from tests.workers.scene import Scene, two_turns

if TYPE_CHECKING:
    from rollout_workers.tasks.episodes import Episodes


async def test_swallowed_engine_failure_fails_the_sample_all_the_same() -> None:
    async def rollout(episode: Episode) -> float:
        try:
            await episode.generate()
        except Exception:  # noqa: BLE001 - what the test is about
            return 0.0
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=1, most=2)
    scene.engine.fail_samples(0, 9)
    with pytest.raises(SamplesFailed, match="a fault was injected"):
        await scene.run()
    assert scene.engine.answered == {0: 2}


async def test_engine_that_fails_once_is_not_noticed_by_the_function() -> None:
    calls: Counter[int] = Counter()

    async def rollout(episode: Episode) -> float:
        calls[episode.sample_index] += 1
        return (await two_turns(episode)) or 0.0

    scene = Scene(rollout)
    scene.engine.fail_samples(1, 1)
    assert await scene.run()
    assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    assert scene.engine.answered == {0: 2, 1: 3, 2: 2, 3: 2}


class Breaking(SimulatedEngine):
    """Its first call breaks off, with the first tokens of every sample; sample 1 was just finished."""

    broken = False

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        if self.broken:
            return await super().generate(requests, deadline_s=deadline_s)
        self.broken = True
        error = EngineUnavailable("e", "generating", "connection reset")
        error.partial = tuple(
            generated(r.sample_index, [50, 51, 52], ("1.0", 0, 3), finish="stop" if r.sample_index == 1 else "abort")
            for r in requests
        )
        raise error


@pytest.mark.parametrize("single_turn", [True, False])
async def test_tokens_that_came_before_a_connection_broke_are_kept(single_turn: bool) -> None:
    scene = Scene(two_turns, group_size=2 if single_turn else 1)
    scene.engine.__class__ = Breaking
    making: SingleTurn | Episodes = await scene.build()
    if single_turn:
        making = SingleTurn(scene.progress, scene.slot, Attempts(3), timeout_s=20)
    running = asyncio.create_task(making.run())
    await scene.slot.changes.until(lambda: scene.slot.suspect)
    # What the guard does when the engine answers its probe.
    scene.slot.move(Event.ANSWERED)
    assert await asyncio.wait_for(running, 20)
    assert scene.progress.samples[0].output_ids[:3].tolist() == [50, 51, 52]
    assert len(scene.progress.samples[0].output_ids) > 10
    if single_turn:
        assert scene.progress.samples[1].output_ids.tolist() == [50, 51, 52]
    assert scene.progress.discarded == {}
    assert scene.balanced()


# ── weights that change under way ────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_versions_of_every_turn_are_kept_in_every_pause_mode(mode: PauseMode, tmp_path: Any) -> None:
    loaded = asyncio.Event()
    first, second = asyncio.Event(), asyncio.Event()

    async def rollout(episode: Episode) -> float:
        await episode.generate()
        first.set()
        await loaded.wait()
        episode.append("tool", ids=[7, 8])
        second.set()
        await episode.generate()
        episode.finish()
        return 1.0

    scene = Scene(rollout, group_size=1, tokens_per_s=100.0, length=50)
    running = asyncio.create_task((await scene.build()).run())
    engine, slot = scene.engine, scene.slot

    async def reload(label: str) -> None:
        await engine.pause(mode)
        await engine.load_files(tmp_path, label)
        slot.adopt(Version.parse(label) or slot.loaded)
        await engine.resume()

    await eventually(lambda: bool(engine._decoding))
    await time_passes(0.1)
    await reload("1.1")
    await asyncio.wait_for(first.wait(), 10)
    await reload("1.2")
    loaded.set()
    await asyncio.wait_for(second.wait(), 10)
    await eventually(lambda: bool(engine._decoding))
    await time_passes(0.1)
    await reload("1.3")
    assert await asyncio.wait_for(running, 20)
    header, columns = scene.group()
    sample = header.samples[0]
    spans = [(span.version.version, span.start, span.end) for span in sample.spans]
    assert [version for version, _, _ in spans] == [0, 1, 2, 3]
    # The environment's two tokens carry the version of the token before them.
    turn_end = sample.turns[0].end
    assert spans[1][2] == turn_end + 2 == sample.turns[1].end
    assert columns["loss_mask"][turn_end : turn_end + 2].tolist() == [0, 0]
    assert scene.balanced()
