import asyncio
from pathlib import Path

import pytest

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.slots.engine_state import Event
from rollout_workers.versions import BASE, Version
from tests.workers.building import eventually, time_passes, weight_files
from tests.workers.fake_service import FakeService
from tests.workers.loading import Loading, loading


def may_work(it: Loading) -> bool:
    return it.slot.leasable


async def test_engine_at_the_start_of_a_fresh_run_needs_no_load(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        assert it.engine.calls == []
        assert it.slot.leasable


async def test_published_version_is_loaded_between_pause_and_resume(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]
        assert await it.engine.ready()
        assert (it.slot.reloads, it.slot.errors) == (1, 0)


async def test_files_are_there_before_the_engine_is_paused(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=1.0) as it:
        await it.until_loaded(1, 0)
        missing = weights_pb2.FilesManifest(base_url=str(tmp_path / "nowhere"))
        missing.files.add(name="model", size_bytes=1, sha256=bytes(32))
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=missing))
        await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert it.engine.calls == []
        assert "cannot be had from" in it.slot.last_error


async def test_superseded_versions_are_skipped(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        it.engine.stall()
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.loading, 10)
        for version in range(2, 6):
            await it.publish(1, version)
        it.engine.unstall()
        await it.until_loaded(1, 5)
        loads = [call for call in it.engine.calls if call.startswith("load")]
        assert loads[-1] == "load 1.5"
        assert len(loads) <= 2


async def test_superseded_version_that_nobody_has_any_more_does_not_hold_the_next_one_up(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path, timeout_s=60.0) as it:
        gone = it.files(1, 1)
        gone.base_url = "http://127.0.0.1:9/v"
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=gone))
        await eventually(lambda: any((tmp_path / "weights-w.e0").glob(".1.1-*.part-w")))
        await it.publish(2, 1)
        await it.until_loaded(2, 1)
        assert [call for call in it.engine.calls if call.startswith("load")] == ["load 2.1"]


async def test_lower_version_of_a_new_term_is_loaded(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 7)
        await it.until_loaded(1, 7)
        await it.publish(2, 3)
        await it.until_loaded(2, 3)
        assert await it.engine.loaded_version() == "2.3"


async def test_resume_at_version_zero_goes_back_to_the_base_model(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        await fake.publish(2, 0)
        await it.until_loaded(2, 0)
        assert it.engine.calls[-3:] == ["pause retract", "load 2.0", "resume"]


async def test_version_zero_without_a_base_model_says_what_to_do(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, base_model=None, version_label="1.4") as it:
        assert await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert "the engine holds 1.4; name the base model" in it.slot.last_error
        assert not it.slot.leasable


async def test_label_of_somebody_else_is_not_trusted(fake: FakeService, tmp_path: Path) -> None:
    # The engine says 1.1, but of which run?
    async with loading(fake, tmp_path, version_label="1.1") as it:
        assert it.slot.loaded == Version(1, 1)
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]


async def test_version_without_files_waits_for_whoever_writes_the_weights(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await fake.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert "waits on whoever writes its weights" in it.slot.last_error
        it.engine._weights.label = "1.1"
        await it.until_loaded(1, 1)
        assert it.engine.calls == []


async def test_failed_load_keeps_the_old_weights_serving_and_is_repeated(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.fail_next_loads(1)
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.errors == 1 and not it.slot.loading, 10)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]
        assert it.slot.leasable
        assert it.slot.loaded == BASE
        await it.until_loaded(1, 1)


async def test_engine_that_cannot_be_trusted_stays_paused(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.weights_unknown = True
        it.engine.fail_next_loads(1)
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.errors == 1, 10)
        assert not await it.engine.ready()
        await it.until_loaded(1, 1)
        assert it.engine.calls.count("resume") == 1
        assert await it.engine.ready()


async def test_engine_that_keeps_failing_is_quarantined_and_rejoins_at_the_newest(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        it.engine.fail_next_loads(1_000)
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.quarantined, 10)
        assert it.state == "QUARANTINED"
        assert not may_work(it)
        await it.publish(1, 2)
        it.engine.fail_next_loads(0)
        await it.until_loaded(1, 2)
        assert may_work(it)
        assert it.state == "READY"


async def test_wrong_checksum_never_reaches_the_engine(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        files = weight_files(tmp_path / "published", {"model": b"right"})
        (tmp_path / "published" / "model").write_bytes(b"wrong")
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        assert await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert "model: its SHA-256 is" in it.slot.last_error
        assert it.engine.calls == []
        (tmp_path / "published" / "model").write_bytes(b"right")
        await it.until_loaded(1, 1)


def hanging(it: Loading, load: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Lets a way to load hang; set once it does."""
    entered = asyncio.Event()

    async def hang(path: Path, label: str) -> None:
        entered.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(it.engine, load, hang)
    return entered


async def test_cancelled_load_does_not_leave_the_engine_paused(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path, load_timeout_s=30.0) as it:
        await it.until_loaded(1, 0)
        entered = hanging(it, "load_files", monkeypatch)
        await it.publish(1, 1)
        await entered.wait()
    assert it.engine.calls[-1] == "resume"
    assert await it.engine.ready()


async def test_cancelled_handover_leaves_the_engine_paused(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path, load_timeout_s=30.0) as it:
        await it.until_loaded(1, 0)
        entered = hanging(it, "load_tensors", monkeypatch)
        manifest = weights_pb2.TensorsManifest(files=it.files(1, 1))
        await fake.publish(1, 1, weights_pb2.WeightManifest(tensors=manifest))
        await entered.wait()
    # Some of the new values may be in place.
    assert it.engine.calls == ["pause retract"]
    assert not await it.engine.ready()


async def test_load_that_ends_in_an_error_of_any_kind_leaves_the_engine_paused(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)

        async def break_off(path: Path, label: str) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(it.engine, "load_files", break_off)
        await it.publish(1, 1)
        await it.until(lambda: it.slot.broken)
        assert it.engine.calls == ["pause retract"]
        assert not await it.engine.ready()


async def test_engine_that_may_hold_a_mixture_does_not_count_as_at_version_zero(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.weights.loader._BACKOFF", Backoff(first_s=60.0, ceiling_s=60.0))
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.weights_unknown = True
        it.engine.fail_next_loads(1)
        await it.publish(1, 1)
        await it.until(lambda: it.slot.errors == 1)
        await fake.publish(2, 0)
        await it.until_loaded(2, 0)
        assert it.engine.calls == ["pause retract", "load 1.1", "pause retract", "load 2.0", "resume"]


async def test_engine_that_is_lost_is_left_to_the_guard(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.slot.move(Event.LOST)
        await it.publish(1, 1)
        await time_passes(0.3)
        assert it.engine.calls == []
        assert it.slot.errors == 0
        it.slot.move(Event.BACK)
        await it.until_loaded(1, 1)


async def test_watch_goes_on_after_a_restart_of_the_service(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await fake.stop()
        await it.publish(1, 1)
        await fake.start()
        await it.until_loaded(1, 1)


async def test_load_that_hangs_is_quarantined_at_its_deadline(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=0.3, load_timeout_s=30.0, control_timeout_s=30.0) as it:
        await it.until_loaded(1, 0)
        it.engine.stall()
        began = asyncio.get_running_loop().time()
        await it.publish(1, 1)
        await it.until(lambda: it.slot.quarantined)
        assert asyncio.get_running_loop().time() - began < 5
        assert not it.slot.leasable
        assert it.slot.last_error == "weights 1.1 were not loaded within 0.3 s"
        it.engine.unstall()
        await it.until_loaded(1, 1)
        assert it.state == "READY"


async def test_engine_that_refuses_is_quarantined_at_its_deadline_for_what_it_refused(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither the quarantine nor newer weights wait for the next attempt.
    monkeypatch.setattr("rollout_workers.weights.loader._BACKOFF", Backoff(first_s=60.0, ceiling_s=60.0))
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        await it.until_loaded(1, 0)
        it.engine.fail_next_loads(1_000)
        began = asyncio.get_running_loop().time()
        await it.publish(1, 1)
        await it.until(lambda: it.slot.quarantined)
        assert 0.3 <= asyncio.get_running_loop().time() - began < 10
        await it.publish(1, 2)
        await it.until(lambda: "weights 1.2 from" in it.slot.last_error)
        assert "a fault was injected" in it.slot.last_error


# ── back to a version that it has, as when an evaluation ends ────────────────


async def test_quarantine_ends_when_what_could_not_be_had_is_wanted_no_longer(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        await it.publish(1, 5)
        await it.until_loaded(1, 5)
        missing = weights_pb2.FilesManifest(base_url=str(tmp_path / "nowhere"))
        missing.files.add(name="model", size_bytes=1, sha256=bytes(32))
        await fake.publish(1, 7, weights_pb2.WeightManifest(files=missing))
        await it.until(lambda: it.slot.quarantined)
        await it.publish(1, 5)
        await it.until(lambda: it.slot.leasable)
        assert it.state == "READY"
        assert it.engine.calls == ["pause retract", "load 1.5", "resume"]


async def test_mixture_is_loaded_over_although_the_version_is_the_one_it_had(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.weights.loader._BACKOFF", Backoff(first_s=60.0, ceiling_s=60.0))
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        await it.publish(1, 5)
        await it.until_loaded(1, 5)
        it.engine.calls.clear()
        it.engine.weights_unknown = True
        it.engine.fail_next_loads(1)
        await it.publish(1, 7)
        await it.until(lambda: it.slot.quarantined)
        await it.publish(1, 5)
        await it.until(lambda: it.state == "READY")
        assert it.engine.calls[:3] == ["pause retract", "load 1.7", "pause abort"]
        assert it.engine.calls[3:] == ["pause retract", "load 1.5", "resume"]
        assert await it.engine.ready()
