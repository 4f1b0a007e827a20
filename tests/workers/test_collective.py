"""A worker's part in collective updates, against a fake service and a simulated engine."""

from pathlib import Path

import pytest

from rollout_buffer.v1 import common_pb2, weights_pb2
from rollout_workers.engine.types import PauseMode
from rollout_workers.versions import Version
from rollout_workers.weights import collective
from tests.workers.building import time_passes
from tests.workers.fake_service import FakeService
from tests.workers.loading import loading
from tests.workers.planning import ABANDONED, BROADCAST, PREPARE, broadcast_manifest, plan, prepared, received


@pytest.mark.parametrize("mode", PauseMode)
async def test_member_joins_pauses_receives_and_goes_on_when_it_is_published(
    fake: FakeService, tmp_path: Path, mode: PauseMode
) -> None:
    async with loading(fake, tmp_path, pause_mode=mode) as it:
        await prepared(it)
        report = fake.engine()
        assert (report.membership, it.state) == (1, "LOADING")
        assert it.engine.calls == ["join g1 1/3", f"pause {mode}"]
        assert not await it.engine.ready()
        await fake.announce(plan(1, BROADCAST))
        await fake.until(lambda: fake.engine().loaded.version == 1)
        assert it.engine.calls[2:] == ["receive 1.1 ['a']"]
        assert not await it.engine.ready()
        await fake.publish(1, 1, broadcast_manifest())
        await it.until_loaded(1, 1)
        assert it.engine.calls[3:] == ["resume"]
        await fake.until(lambda: fake.engine().reloads == 1 and not fake.engine().HasField("prepared"))
        assert (it.state, it.slot.errors) == ("READY", 0)


async def test_buckets_are_taken_as_they_are_announced_and_the_reports_say_that_they_can_be(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it, bucket_tensors=(1,))
        assert it.engine.calls[2:] == ["receive 1.1 ['a'] in buckets of [1]"]
        assert fake.engine().takes_buckets


async def test_buckets_of_other_tensors_than_are_announced_are_refused_before_the_group_is_joined(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await fake.announce(plan(1, PREPARE, bucket_tensors=(1, 1)))
        await fake.until(lambda: "1 tensors come in buckets of 2" in fake.engine().last_error)
        assert "join g1 1/3" not in it.engine.calls
        assert (it.slot.loaded, it.slot.leasable) == (Version(1, 0), True)


async def test_next_update_of_the_same_group_needs_no_join(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        for version in (1, 2):
            await received(it, version)
            await fake.publish(1, version, broadcast_manifest())
            await it.until_loaded(1, version)
        assert [call for call in it.engine.calls if call.startswith(("join", "leave"))] == ["join g1 1/3"]


async def test_new_group_is_joined_after_the_old_one_was_left(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it, 1)
        await fake.publish(1, 1, broadcast_manifest())
        await received(it, 2, membership=2)
        assert it.engine.calls[4:7] == ["leave g1", "join g2 1/3", "pause retract"]


async def test_group_of_a_resumed_trainer_is_joined_though_it_has_the_same_number(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it, 1)
        await fake.publish(1, 1, broadcast_manifest())
        await it.until_loaded(1, 1)
        await it.publish(2, 1)
        await it.until_loaded(2, 1)
        it.engine.calls.clear()
        of_another_trainer = plan(2, PREPARE, term=2)
        of_another_trainer.master_port = 2
        await fake.announce(of_another_trainer)
        await fake.until(lambda: fake.engine().prepared == common_pb2.WeightVersion(term=2, version=2))
        assert it.engine.calls == ["leave g1", "join g1 1/3", "pause retract"]


async def test_plan_without_this_engine_is_none_of_its_business(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await fake.announce(plan(1, PREPARE, members=("other",)))
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]


async def test_abandoned_before_the_broadcast_goes_on_with_the_old_weights(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await prepared(it)
        await fake.announce(plan(1, ABANDONED))
        await it.until(lambda: not it.slot.loading)
        assert it.engine.calls[2:] == ["leave g1", "resume"]
        assert (it.slot.loaded, it.slot.leasable, it.slot.errors) == (Version(1, 0), True, 0)
        await fake.until(lambda: fake.engine().membership == 0)


async def test_regrouped_plan_is_joined_anew(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await prepared(it)
        await fake.announce(plan(1, PREPARE, membership=2, members=("w.e0",)))
        await fake.until(lambda: fake.engine().membership == 2 and fake.engine().prepared.version == 1)
        assert it.engine.calls[2:] == ["leave g1", "resume", "join g2 1/2", "pause retract"]


async def test_failed_join_is_reported_and_not_repeated(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.fail_next_joins(1)
        await fake.announce(plan(1, PREPARE))
        await fake.until(lambda: "process group g1 were not loaded" in fake.engine().last_error)
        await it.until(lambda: not it.slot.loading)
        assert "pause retract" not in it.engine.calls
        assert it.slot.leasable
        await fake.announce(plan(1, PREPARE, membership=2))
        await fake.until(lambda: fake.engine().membership == 2 and fake.engine().prepared.version == 1)
        joins = [call for call in it.engine.calls if call.startswith("join")]
        assert joins == ["join g1 1/3", "join g2 1/3"]


async def test_failed_receive_that_kept_the_old_weights_goes_on_with_them(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await prepared(it)
        it.engine.fail_next_loads(1)
        await fake.announce(plan(1, BROADCAST))
        await it.until(lambda: it.slot.errors == 1 and not it.slot.loading)
        assert it.engine.calls[2:] == ["receive 1.1 ['a']", "leave g1", "resume"]
        assert (it.slot.loaded, it.slot.leasable) == (Version(1, 0), True)


async def test_received_and_never_published_is_not_served(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        it.engine.calls.clear()
        await received(it, 2)
        await fake.announce(plan(2, ABANDONED))
        await it.until(lambda: it.slot.reloads == 2)
        # The published files again, before it goes on.
        assert it.engine.calls[3:] == ["leave g1", "pause retract", "load 1.1", "resume"]
        await it.until_loaded(1, 1)


async def test_received_and_never_published_waits_for_the_next_plan_where_there_are_no_files(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it, 1)
        await fake.publish(1, 1, broadcast_manifest())
        await received(it, 2)
        await fake.announce(plan(2, ABANDONED))
        await fake.until(lambda: "waits for the next collective update" in fake.engine().last_error)
        await it.until(lambda: it.slot.membership == 0)
        assert not await it.engine.ready()
        assert (it.state, it.slot.leasable) == ("LOADING", False)
        # Not 1.2: the trainer would take it for done.
        assert fake.engine().loaded.version == 1
        await fake.announce(plan(2, PREPARE, membership=2))
        await fake.until(lambda: fake.engine().prepared.version == 2)
        await fake.announce(plan(2, BROADCAST, membership=2))
        await fake.until(lambda: fake.engine().loaded.version == 2)
        await fake.publish(1, 2, broadcast_manifest(2))
        await it.until_loaded(1, 2)
        assert await it.engine.ready()
        assert (it.state, it.slot.leasable) == ("READY", True)


async def test_mixture_is_not_served(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await prepared(it, 2)
        it.engine.fail_next_loads(1)
        it.engine.weights_unknown = True
        await fake.announce(plan(2, BROADCAST))
        await it.until(lambda: it.slot.reloads == 2)
        assert it.engine.calls[-4:] == ["leave g1", "pause retract", "load 1.1", "resume"]


async def test_resume_of_the_trainer_takes_a_plan_back(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await prepared(it)
        await fake.publish(2, 0)
        await it.until_loaded(2, 0)
        assert await it.engine.ready()
        assert it.slot.membership == 0
        assert it.engine.calls[2:4] == ["leave g1", "resume"]


async def test_trainer_that_falls_silent_is_not_waited_for_forever(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "EXPIRY_S", 0.1)
    async with loading(fake, tmp_path) as it:
        await prepared(it, timeout_ms=200)
        await it.until(lambda: not it.slot.loading)
        assert it.engine.calls[2:] == ["leave g1", "resume"]
        assert "no step of the trainer within 0.3 s" in it.slot.last_error
        assert it.slot.leasable
        # The same plan is not taken up again.
        await time_passes(0.3)
        assert it.engine.calls[4:] == []


async def test_engine_that_was_no_member_loads_the_fallback(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await fake.publish(1, 1, broadcast_manifest(fallback=it.files(1, 1)))
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]


async def test_engine_that_was_no_member_stays_behind_without_a_fallback(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await fake.publish(1, 1, broadcast_manifest())
        await it.until(lambda: it.slot.awaits_plan)
        assert (it.state, it.slot.leasable, it.slot.errors) == ("READY", True, 0)
        assert it.engine.calls == []
        await fake.announce(plan(2, PREPARE, membership=2))
        await fake.until(lambda: fake.engine().prepared.version == 2)


async def test_fresh_engine_without_anything_to_load_offers_itself_as_a_member(
    fake: FakeService, tmp_path: Path
) -> None:
    await fake.publish(1, 3, broadcast_manifest())
    async with loading(fake, tmp_path) as it:
        await it.until(lambda: it.slot.awaits_plan)
        assert (it.state, it.slot.leasable) == ("LOADING", False)
        assert "waits for the next collective update" in it.slot.last_error
        await it.publish(1, 4)
        await it.until_loaded(1, 4)
        assert it.state == "READY"


async def test_plan_overtakes_a_load_that_cannot_be_fetched(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        missing = weights_pb2.FilesManifest(base_url=str(tmp_path / "nowhere"))
        missing.files.add(name="model", size_bytes=1, sha256=bytes(32))
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=missing))
        await it.until(lambda: it.slot.errors > 2)
        await fake.announce(plan(2, PREPARE))
        await fake.until(lambda: fake.engine().prepared.version == 2)
