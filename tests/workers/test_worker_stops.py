"""A worker that is stopped, against a fake of the service: what it made is pushed, or handed back and gone on with."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2, tasks_pb2, weights_pb2
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.worker import Worker
from tests.engine.fake_sglang import FakeSglang, answer, asks_vocabulary, event, refused
from tests.workers.building import eventually, length_reward, options, task, time_passes, weight_files
from tests.workers.fake_service import FakeService
from tests.workers.working import all_done, given_back, working


async def test_stop_hands_partial_work_back_and_another_worker_finishes_it(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=60) for i in range(3)))
    slow = SimulatedOptions(tokens_per_s=40.0, length_median=60.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=slow) as first:
        # The time is that of decoding, which begins a while after the leases.
        await eventually(lambda: sum(slot.in_flight for slot in first.worker.slots) == 12)
        await time_passes(0.5)
        await first.end()
    returned = given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)
    assert len(returned) == 3
    kept = {r.lease_id.split("/")[0]: r.partial_rollout.header for r in returned}
    for header in kept.values():
        assert {s.finish_reason for s in header.samples} == {groups_pb2.FINISH_REASON_ABORTED}
        assert all(10 <= s.tokens - s.prompt_len < 60 for s in header.samples)

    began = {t: fake.tasks[t].partial_rollout for t in kept}
    async with working(fake, tmp_path, worker_id="w2") as second:
        await fake.until(all_done(fake))
    assert second.worker.counters.partial_rollouts == 3
    for task_id, partial_rollout in began.items():
        assert partial_rollout is not None
        old = read_payload(partial_rollout.header, partial_rollout.payload)["token_ids"]
        at = 0
        for sample, ids in zip(partial_rollout.header.samples, fake.tokens(task_id), strict=True):
            assert ids[: sample.tokens] == old[at : at + sample.tokens].tolist()
            assert len(ids) <= 63
            at += sample.tokens


async def test_stop_pushes_groups_that_are_made(fake: FakeService, tmp_path: Path) -> None:
    fake.hold_pushes.clear()
    await fake.submit(*(task(f"t{i}") for i in range(3)))
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.bundles))
        running.worker.stop()
        await eventually(lambda: running.worker._seats.dispatchers[0]._stopping)
        fake.hold_pushes.set()
    assert len(fake.results()) == 3
    assert fake.returns == []


async def test_stop_hands_back_groups_that_nobody_takes(fake: FakeService, tmp_path: Path) -> None:
    fake.hold_pushes.clear()
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, drain_grace_s=1.5) as running:
        await fake.until(lambda: bool(fake.bundles))
        running.worker.stop()
    returned = given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)
    assert [r.lease_id for r in returned] == ["t1/0/1"]
    assert groups_pb2.FINISH_REASON_ABORTED not in {s.finish_reason for s in returned[0].partial_rollout.header.samples}


async def test_finished_samples_of_a_partial_rollout_are_not_generated_again(fake: FakeService, tmp_path: Path) -> None:
    fake.hold_pushes.clear()
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, drain_grace_s=1.5) as first:
        await fake.until(lambda: bool(fake.bundles))
        first.worker.stop()
    await fake.until(lambda: fake.held_pushes == 0)
    fake.hold_pushes.set()
    async with working(fake, tmp_path, worker_id="w2") as second:
        await fake.until(all_done(fake))
    assert second.worker.counters.tokens == 0
    assert fake.results()["t1"].header.lease_id == "t1/0/2"


async def test_stop_during_a_granted_lease_request_loses_no_task(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted, release, original = asyncio.Event(), asyncio.Event(), fake.lease

    async def answer_late(request: tasks_pb2.LeaseTasksRequest) -> tasks_pb2.LeaseTasksResponse:
        reply = await original(request)
        if reply.leases and not granted.is_set():
            granted.set()
            await release.wait()
        return reply

    monkeypatch.setattr(fake, "lease", answer_late)
    await fake.submit(task("t1"))
    async with working(fake, tmp_path) as running:
        await asyncio.wait_for(granted.wait(), 10)
        running.worker.stop()
    assert not any(t.leased_to for t in fake.tasks.values())
    assert [r.lease_id for r in given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)] == ["t1/0/1"]


async def test_stop_hands_the_work_of_an_engine_back_that_does_not_abort(fake: FakeService, tmp_path: Path) -> None:
    async def two_tokens_and_no_end(body: Any) -> web.StreamResponse:
        if body.get("token_ids_logprob"):
            return await asks_vocabulary(body)

        async def written() -> AsyncIterator[bytes]:
            for i, rid in enumerate(body["rid"]):
                yield event({**answer(rid, [7, 8], finish_reason=None), "index": i})
            await asyncio.Event().wait()

        return web.Response(body=written(), content_type="text/event-stream")

    async def broken(body: Any) -> web.StreamResponse:
        return refused("internal", status=500)

    async with FakeSglang() as server:
        server.version = "default"
        server.handlers |= {"/generate": two_tokens_and_no_end, "/abort_request": broken}
        await fake.submit(*(task(f"t{i}", group_size=2) for i in range(2)))
        made = options(fake.address, tmp_path, simulated=None, engine_urls=(server.url,))
        worker = Worker(made, reward=length_reward)
        running = asyncio.create_task(worker.run())
        await eventually(lambda: bool(worker.slots) and worker.slots[0].engine.tokens_in_hand == 8)
        worker.stop()
        await asyncio.wait_for(running, 15)
    returned = given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)
    assert sorted(r.lease_id for r in returned) == ["t0/0/1", "t1/0/1"]
    # The 2 tokens of each sample that had arrived, after a prompt of 3.
    assert [s.tokens for r in returned for s in r.partial_rollout.header.samples] == [5, 5, 5, 5]


async def test_stop_does_not_wait_for_a_service_that_takes_no_last_report(fake: FakeService, tmp_path: Path) -> None:
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.lease_requests))
        fake.hold_reports.clear()
        running.worker.stop()
        # One attempt alone could take 15 s; the last report has one second, and the drain nothing to wait for.
        await asyncio.wait_for(asyncio.shield(running.running), 10)
    assert fake.engine().state != weights_pb2.ENGINE_STATE_STOPPED
    fake.hold_reports.set()


async def test_partial_rollout_waits_for_an_engine_that_is_behind_its_weights(
    fake: FakeService, tmp_path: Path
) -> None:
    files = weight_files(tmp_path / "v1", {"model": b"1"})
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
    await fake.submit(task("t1", max_new_tokens=40))
    slow = SimulatedOptions(tokens_per_s=10.0, length_median=40.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=slow) as first:
        await fake.until(lambda: any(slot.in_flight for slot in first.worker.slots))
        await time_passes(0.3)
        await first.end()
    assert fake.tasks["t1"].partial_rollout is not None
    # A second worker that hears of version 0 first, and of version 1 only after it has the lease.
    await fake.publish(1, 0)
    async with working(fake, tmp_path, worker_id="w2"):
        await fake.until(lambda: fake.tasks["t1"].attempt == 2)
        await time_passes(0.2)
        assert fake.results() == {}
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(all_done(fake))
    for sample in fake.results()["t1"].header.samples:
        assert [span.version.version for span in sample.spans] == [1]
