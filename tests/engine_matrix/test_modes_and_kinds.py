"""Every pause mode with every way that weights take, on two real engines under load; a sample that one takes over."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.counters import Counters
from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.types import PauseMode
from rollout_workers.generation import spread as spreading
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.spread import Spread
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.rollout import SingleTurn
from rollout_workers.versions import Version
from tests.engine.test_sglang_real import reference_logprobs
from tests.engine_matrix import results
from tests.engine_matrix.cell import Cell, check_cell, run_cell
from tests.engine_matrix.kinds import KINDS
from tests.engine_matrix.servers import Servers
from tests.engine_matrix.truth import SHAPE
from tests.support.service import ServiceProcess
from tests.support.tiny_model import write_random_model

MODES = ("retract", "in_place", "abort")
TOKENS = 1_500
"""Length of the sample that is moved: 2 to 4 s on an engine."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3_600)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_token_names_its_weights_and_none_is_lost(
    mode: str, kind: str, updates: int, servers: Servers, service: ServiceProcess, tmp_path: Path
) -> None:
    cell = Cell(mode, kind, updates, salt=20 * (MODES.index(mode) * len(KINDS) + KINDS.index(kind)))
    outcome = run_cell(cell, tmp_path, service.address, servers.urls)
    results.note(outcome, overlap=False)
    check_cell(outcome)
    assert outcome.seen.mislabelled == 0


def test_a_sample_that_is_moved_keeps_every_token_with_its_version_and_log_probability(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [write_random_model(tmp_path / f"random-{seed}", seed=seed, shape=SHAPE) for seed in (0, 1)]
    progress = asyncio.run(_moved(servers.urls, models, monkeypatch))
    (sample,) = progress.samples
    assert len(sample) == progress.received == TOKENS
    assert progress.discarded == {}
    first, second = sample.spans
    assert (first.version, second.version) == (Version(1, 1), Version(1, 2))
    assert (first.start, first.end, second.end) == (0, second.start, TOKENS)
    assert 10 < first.end < TOKENS - 10
    # Each part is what its own weights say, over the whole prefix; under the other's they are off by far.
    by_model = [reference_logprobs(model, sample.output_ids, progress.prompt_ids) for model in models]
    for own, other, part in ((0, 1, slice(0, first.end)), (1, 0, slice(first.end, TOKENS))):
        errors = [float(np.abs(by_model[which][part] - sample.logprobs[part]).mean()) for which in (own, other)]
        assert errors[0] < 0.05
        assert errors[1] > 0.1


async def _moved(urls: Sequence[str], models: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> GroupProgress:
    """A sample that begins at the first engine, with the first model, and goes on at the second as soon as it may."""
    engines = [SglangEngine(url, options=ServerOptions(generate_timeout_s=60)) for url in urls]
    slots = []
    for engine, model, version in zip(engines, models, (Version(1, 1), Version(1, 2)), strict=True):
        slot = EngineSlot(version.label, engine, await engine.info(), base_model=None)
        await engine.pause(PauseMode.RETRACT)
        await engine.load_files(model, version.label)
        await engine.resume()
        await slot.refresh()
        slot.adopt(version)
        slots.append(slot)
    spread = Spread(slots, Counters())
    monkeypatch.setattr(Spread, "_gain_of", lambda _, part, __: 1.0 if time.monotonic() > part.began_at + 0.7 else None)
    asked = tasks_pb2.Task(task_id="t", group_size=1, prompt_token_ids=[5, 6, 7])
    asked.sampling.max_new_tokens = asked.sampling.min_new_tokens = TOKENS
    lease = tasks_pb2.Lease(lease_id="t/0/1", task=asked, attempt=1, ttl_ms=60_000)
    progress = GroupProgress(lease, np.array([5, 6, 7], np.int32))
    looking = asyncio.create_task(spread.run())
    await asyncio.sleep(2 * spreading.IDLE_S)  # The second one has had nothing to do for a while.
    assert await SingleTurn(progress, slots[0], Attempts(3), timeout_s=60, spread=spread).run()
    looking.cancel()
    await asyncio.gather(looking, *(engine.close() for engine in engines), return_exceptions=True)
    return progress
