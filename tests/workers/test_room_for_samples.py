"""Room on an engine is counted in samples: what has ended holds none, though its group goes on."""

from pathlib import Path

import pytest

from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine
from rollout_workers.engine.types import SampleRequest
from tests.workers.building import task, time_passes
from tests.workers.fake_service import FakeService
from tests.workers.scripted import script_lengths
from tests.workers.working import working

_ENDLESS = 100_000


def _last_is_endless(request: SampleRequest) -> int:
    return _ENDLESS if request.sample_index == 3 else 20


async def test_a_group_whose_last_sample_runs_holds_one_slot(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_lengths(monkeypatch, _last_is_endless)
    most = 0
    decode = SimulatedEngine._decode

    async def counted(engine: SimulatedEngine, sample: object) -> None:
        nonlocal most
        most = max(most, len(engine._decoding))
        await decode(engine, sample)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedEngine, "_decode", counted)
    await fake.submit(*(task(f"t{i}", max_new_tokens=_ENDLESS) for i in range(12)))
    simulated = SimulatedOptions(tokens_per_s=1_000.0)
    async with working(fake, tmp_path, simulated=simulated, groups_per_engine=2) as running:
        # Room for 8 samples: with the last one of five groups there is none for another four.
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 5)
        await time_passes(0.3)
        slot, driver = running.worker.slots[0], running.worker._seats.drivers[0]
        assert (driver.held, driver.generating, slot.in_flight, most) == (5, 5, 5, 8)
    for back in fake.returns:
        ends = [sample.finish_reason for sample in back.partial_rollout.header.samples]
        assert ends == [groups_pb2.FINISH_REASON_STOP] * 3 + [groups_pb2.FINISH_REASON_ABORTED]
