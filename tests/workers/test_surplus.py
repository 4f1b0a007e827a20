"""Surplus samples: the first that end make the group, and what is cut off is counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.errors import EngineMalformed
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.engine.types import SampleRequest
from rollout_workers.rewards import RewardInput
from tests.workers.building import task, time_passes
from tests.workers.fake_service import FakeService
from tests.workers.scripted import script_lengths
from tests.workers.working import all_done, working

LENGTHS = (60, 20, 5_000, 40, 30, 9_000)


def by_index(request: SampleRequest) -> int:
    return LENGTHS[request.sample_index]


@pytest.mark.parametrize("surplus", [0, 2])
async def test_the_first_that_end_make_the_group(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surplus: int
) -> None:
    lengths = LENGTHS if surplus else (60, 20, 50, 40)
    script_lengths(monkeypatch, lambda request: lengths[request.sample_index])
    await fake.submit(*(task(f"t{i}", max_new_tokens=10_000) for i in range(3)))
    simulated = SimulatedOptions(tokens_per_s=500.0)
    async with working(fake, tmp_path, simulated=simulated, surplus_samples=surplus) as running:
        await fake.until(all_done(fake))
        slot, counters = running.worker.slots[0], running.worker.counters
    kept = [60, 20, 40, 30] if surplus else [60, 20, 50, 40]
    for task_id, group in fake.results().items():
        assert [sample.tokens - 3 for sample in group.header.samples] == kept
        assert [row[3:] for row in fake.tokens(task_id)] == [list(range(length)) for length in kept]
        assert len(read_payload(group.header, group.payload)["logprobs"]) == sum(kept) + 12
        assert {sample.finish_reason for sample in group.header.samples} == {groups_pb2.FINISH_REASON_STOP}
    # Two samples of each group ran until the longest that counts had ended.
    assert counters.surplus_samples == slot.surplus_samples == 3 * surplus
    assert counters.tokens_discarded["surplus"] == slot.surplus_tokens
    assert 60 * 3 * surplus * 0.5 <= slot.surplus_tokens <= 60 * 3 * surplus * 3
    assert counters.tokens_pushed == 3 * sum(kept)


async def test_surplus_takes_room_and_a_partial_rollout_has_the_size_of_the_group(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_lengths(monkeypatch, lambda request: 20 if request.sample_index == 5 else 50_000)
    await fake.submit(*(task(f"t{i}", max_new_tokens=90_000) for i in range(9)))
    simulated = SimulatedOptions(tokens_per_s=500.0)
    async with working(fake, tmp_path, simulated=simulated, surplus_samples=2, groups_per_engine=5) as running:
        # Room for 20: three groups of 6, of each of which one ends.
        await fake.until(lambda: sum(bool(leased.leased_to) for leased in fake.tasks.values()) == 3)
        await time_passes(0.3)
        assert (running.worker.slots[0].in_flight, running.worker._seats.drivers[0].held) == (15, 3)
    for back in fake.returns:
        finishes = [sample.finish_reason for sample in back.partial_rollout.header.samples]
        assert finishes.count(groups_pb2.FINISH_REASON_STOP) == 1, "what is finished is kept"
        assert len(finishes) == 4


async def test_a_sample_that_is_cut_off_takes_its_failures_with_it(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def fails_once(sample: RewardInput) -> float:
        nonlocal asked
        asked += sample.sample_index == 0
        if sample.sample_index == 0 and asked == 1:
            raise RuntimeError("the judge hiccups")
        return 1.0

    generate, calls = SimulatedEngine.generate, 0

    async def fails_first(engine: SimulatedEngine, requests: Sequence[SampleRequest], **more: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise EngineMalformed("e", "generating", "a hiccup")
        return await generate(engine, requests, **more)

    monkeypatch.setattr(SimulatedEngine, "generate", fails_first)
    async with working(fake, tmp_path, reward=fails_once, limit_s=20.0, surplus_samples=1) as running:
        # All have failed once, and the first twice when the two others make the group.
        running.engine.fail_samples(0, 1)
        await fake.submit(task(group_size=2))
        await fake.until(all_done(fake))
    assert (calls, asked, fake.returns) == (4, 2, [])


@pytest.mark.parametrize("groups", [1, 2])
async def test_a_group_begins_where_nothing_runs_however_much_surplus_there_is(
    fake: FakeService, tmp_path: Path, groups: int
) -> None:
    await fake.submit(*(task(f"t{i}") for i in range(3)))
    async with working(fake, tmp_path, limit_s=10.0, surplus_samples=8, groups_per_engine=groups):
        await fake.until(all_done(fake))
