"""Engines that cannot sample as tasks ask: the engine is named and gets no more work; no task pays for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from structlog.testing import capture_logs

from rollout_buffer.v1 import tasks_pb2, weights_pb2
from rollout_workers.worker import Worker
from tests.engine.fake_sglang import FakeSglang
from tests.workers.building import length_reward, options, task
from tests.workers.fake_service import FakeService
from tests.workers.working import all_done


@asynccontextmanager
async def worker_on(fake: FakeService, tmp_path: Path, *servers: FakeSglang) -> AsyncIterator[Worker]:
    for server in servers:
        server.version = "default"
    made = options(fake.address, tmp_path, simulated=None, engine_urls=tuple(server.url for server in servers))
    worker = Worker(made, reward=length_reward)
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(30):
            yield worker
            worker.stop()
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def narrowed(task_id: str) -> tasks_pb2.Task:
    asked = task(task_id, group_size=2, max_new_tokens=2)
    asked.sampling.top_p = 0.9
    return asked


async def test_engine_that_cannot_sample_as_the_run_asks_is_taken_out_and_no_task_fails(
    fake: FakeService, tmp_path: Path
) -> None:
    async with FakeSglang() as server:
        server.speculative = "EAGLE"
        await fake.submit(*(narrowed(f"t{i}") for i in range(30)))
        async with worker_on(fake, tmp_path, server):
            await fake.until(lambda: fake.engine().state == weights_pb2.ENGINE_STATE_QUARANTINED)
            await fake.until(lambda: not any(each.leased_to for each in fake.tasks.values()))
            assert not any(each.failed for each in fake.tasks.values())
            assert {back.kind for back in fake.returns} == {tasks_pb2.RETURN_KIND_INTERRUPTED}
            # As many as were leased together, not one after the other.
            assert len(fake.returns) <= 8
            assert "top_p" in fake.engine().last_error
            assert "--speculative-algorithm EAGLE" in fake.engine().last_error
            assert all(body.get("token_ids_logprob") for body in server.received["/generate"])


async def test_engine_that_comes_back_with_other_flags_is_given_work_again(fake: FakeService, tmp_path: Path) -> None:
    async with FakeSglang() as server:
        server.mask_max_tokens = 8
        await fake.submit(narrowed("t0"))
        async with worker_on(fake, tmp_path, server) as worker:
            await fake.until(lambda: fake.engine().state == weights_pb2.ENGINE_STATE_QUARANTINED)
            assert "--sampling-mask-max-tokens" in fake.engine().last_error
            server.mask_max_tokens = 64
            server.start_anew()
            for slot in worker.slots:
                slot.doubts += 1
                slot.changes.notify()
            await fake.until(lambda: fake.engine().state == weights_pb2.ENGINE_STATE_READY)
            await fake.until(lambda: any(back for back in server.received["/generate"] if "rid" in back))


async def test_engines_that_can_go_on(fake: FakeService, tmp_path: Path) -> None:
    async with FakeSglang() as server:
        server.speculative = "EAGLE"
        await fake.submit(*(task(f"t{i}", group_size=2, max_new_tokens=2) for i in range(3)))
        async with worker_on(fake, tmp_path, server):
            await fake.until(all_done(fake))


async def test_seeds_that_are_not_heeded_are_said_once(fake: FakeService, tmp_path: Path) -> None:
    tasks = [task(f"t{i}", group_size=2, max_new_tokens=2) for i in range(3)]
    for each in tasks:
        each.sampling.seed = 1
    async with FakeSglang() as server:
        await fake.submit(*tasks)
        with capture_logs() as logs:
            async with worker_on(fake, tmp_path, server):
                await fake.until(all_done(fake))
        notices = [log["notice"] for log in logs if "notice" in log]
        assert [notice for notice in notices if "--enable-deterministic-inference" in notice] == notices != []
        assert len(notices) == 1
        seeds = [
            p["sampling_seed"]
            for body in server.received["/generate"]
            if "rid" in body
            for p in body["sampling_params"]
        ]
        assert sorted(seeds) == [1, 1, 1, 2, 2, 2]
