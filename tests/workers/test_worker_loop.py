"""The whole worker over simulated engines against a fake of the service, named so: the rules of the real one are tested
with the real one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2, tasks_pb2, weights_pb2
from rollout_workers.counters import Counters
from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engine.simulated import SimulatedEngine
from rollout_workers.engines import SimulatedHost
from rollout_workers.functions import Rollout
from rollout_workers.options import SimulatedOptions
from rollout_workers.rewards import RewardFunction, RewardInput, Scorer, Scores
from rollout_workers.samples import GroupProgress
from rollout_workers.worker import Worker
from tests.workers.building import eventually, length_reward, options, task, time_passes, weight_files
from tests.workers.fake_service import FakeService

SLOW = SimulatedOptions(tokens_per_s=50.0, length_median=1_000.0, length_sigma=0.0)


class Running:
    def __init__(self, worker: Worker, hosts: list[SimulatedHost], running: "asyncio.Task[None]") -> None:
        self.worker = worker
        self.hosts = hosts
        self.running = running

    @property
    def engine(self) -> SimulatedEngine:
        return self.hosts[0].engine

    async def end(self) -> None:
        self.worker.stop()
        await asyncio.wait_for(self.running, 20)


@asynccontextmanager
async def working(
    fake: FakeService,
    tmp_path: Path,
    *,
    reward: RewardFunction = length_reward,
    rollout: Rollout | None = None,
    judge: str | None = None,
    from_options: bool = False,
    limit_s: float = 60.0,
    **more: Any,
) -> AsyncIterator[Running]:
    """`judge` names the reward function, as the command line does, empty for none; `reward` is one. `from_options`: the
    functions are those that the options name.
    """
    if judge is not None:
        more["reward"] = judge
    if judge == "":
        more["rollout"] = "m:f"  # As `rollout` is injected, it is never imported.
    made = options(fake.address, tmp_path, **more)
    hosts = [SimulatedHost(i, made) for i in range(made.engine_count)]
    worker = Worker(made, reward=None if from_options or judge is not None else reward, rollout=rollout, hosts=hosts)
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(limit_s):
            yield Running(worker, hosts, running)
            if not running.done():
                worker.stop()
            await running
            assert_every_token_has_an_end(worker.counters)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def assert_every_token_has_an_end(counters: Counters) -> None:
    ended = counters.tokens_pushed + counters.tokens_returned + sum(counters.tokens_discarded.values())
    assert counters.tokens + counters.tokens_resumed == ended, counters


def all_done(fake: FakeService) -> Callable[[], bool]:
    return lambda: len(fake.results()) == len(fake.tasks)


def given_back(fake: FakeService, kind: "tasks_pb2.ReturnKind.ValueType") -> list[tasks_pb2.LeaseReturn]:
    return [returned for returned in fake.returns if returned.kind == kind]


async def test_tasks_become_scored_groups(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", metadata_json='{"i": 1}', environment="sums") for i in range(30)))
    async with working(fake, tmp_path) as running:
        await fake.until(all_done(fake))
    for task_id, group in fake.results().items():
        assert len(group.header.samples) == 4
        for sample, ids in zip(group.header.samples, fake.tokens(task_id), strict=True):
            assert ids[:3] == [1, 2, 3]
            assert sample.reward == len(ids) - 3
            assert sample.spans[0].version.version == 0
        assert group.header.metadata_json == '{"i": 1}'
        logprobs = read_payload(group.header, group.payload)["logprobs"]
        mask = read_payload(group.header, group.payload)["loss_mask"]
        assert np.all((logprobs == 0) | (mask == 1))
    assert fake.returns == []
    counters = running.worker.counters
    assert (counters.pushed["queued"], counters.samples, counters.leases) == (30, 120, 30)


async def test_every_engine_leases_for_itself_up_to_its_concurrency(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=10_000) for i in range(10)))
    simulated = SimulatedOptions(engines=2, tokens_per_s=50.0, length_median=1_000.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated, groups_per_engine=3):
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 6)
        await time_passes(0.3)
        holders = [t.leased_to.split("@")[0] for t in fake.tasks.values() if t.leased_to]
        assert sorted(holders) == ["w.e0"] * 3 + ["w.e1"] * 3
    assert {request.engine_id for request in fake.lease_requests} == {"w.e0", "w.e1"}


async def test_slow_rewards_do_not_idle_the_engine(fake: FakeService, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def reward(sample: RewardInput) -> float:
        await gate.wait()
        return 1.0

    await fake.submit(*(task(f"t{i}") for i in range(20)))
    async with working(fake, tmp_path, reward=reward, groups_per_engine=2):
        # Two on the engine, and four times as many held in all.
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 8)
        gate.set()
        await fake.until(all_done(fake))


async def test_lost_lease_reply_grants_the_same_leases(fake: FakeService, tmp_path: Path) -> None:
    fake.lose_lease_replies = 2
    await fake.submit(*(task(f"t{i}") for i in range(5)))
    async with working(fake, tmp_path):
        await fake.until(all_done(fake))
    assert {t.attempt for t in fake.tasks.values()} == {1}
    assert len({request.request_id for request in fake.lease_requests[:3]}) == 1


async def test_weights_are_loaded_in_flight(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=400) for i in range(8)))
    simulated = SimulatedOptions(tokens_per_s=200.0, length_median=300.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated) as running:
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 8)
        for version in (1, 2):
            await time_passes(0.3)
            files = weight_files(tmp_path / f"v{version}", {"model": b"%d" % version})
            await fake.publish(1, version, weights_pb2.WeightManifest(files=files))
            await fake.until(
                lambda version=version: any(
                    r.loaded.version == version and r.state == weights_pb2.ENGINE_STATE_READY for r in fake.reports
                )
            )
        await fake.until(all_done(fake))
        assert running.worker.slots[0].reloads == 2
    for group in fake.results().values():
        for sample in group.header.samples:
            assert [span.version.version for span in sample.spans] == [0, 1, 2]
    assert fake.reports[-1].state == weights_pb2.ENGINE_STATE_STOPPED


async def test_pause_that_aborts_resumes_the_partial_samples(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(task("t1", max_new_tokens=400))
    simulated = SimulatedOptions(tokens_per_s=200.0, length_median=200.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=simulated, pause_mode="abort"):
        await fake.until(lambda: bool(fake.tasks["t1"].leased_to))
        await time_passes(0.3)
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(all_done(fake))
    assert [[s.version.version for s in sample.spans] for sample in fake.results()["t1"].header.samples] == [[0, 1]] * 4
    assert fake.returns == []


async def test_stop_hands_partial_work_back_and_another_worker_finishes_it(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=60) for i in range(3)))
    slow = SimulatedOptions(tokens_per_s=40.0, length_median=60.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=slow) as first:
        await fake.until(lambda: sum(bool(t.leased_to) for t in fake.tasks.values()) == 3)
        await time_passes(0.5)
        await first.end()
    returned = given_back(fake, tasks_pb2.RETURN_KIND_INTERRUPTED)
    assert len(returned) == 3
    kept = {r.lease_id.split("/")[0]: r.continuation.header for r in returned}
    for header in kept.values():
        assert {s.finish_reason for s in header.samples} == {groups_pb2.FINISH_REASON_ABORTED}
        assert all(10 <= s.tokens - s.prompt_len < 60 for s in header.samples)

    began = {t: fake.tasks[t].continuation for t in kept}
    async with working(fake, tmp_path, worker_id="w2") as second:
        await fake.until(all_done(fake))
    assert second.worker.counters.continuations == 3
    for task_id, continuation in began.items():
        assert continuation is not None
        old = read_payload(continuation.header, continuation.payload)["token_ids"]
        at = 0
        for sample, ids in zip(continuation.header.samples, fake.tokens(task_id), strict=True):
            assert ids[: sample.tokens] == old[at : at + sample.tokens].tolist()
            assert len(ids) <= 63
            at += sample.tokens


async def test_stop_pushes_groups_that_are_made(fake: FakeService, tmp_path: Path) -> None:
    fake.hold_pushes.clear()
    await fake.submit(*(task(f"t{i}") for i in range(3)))
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.bundles))
        running.worker.stop()
        await eventually(lambda: running.worker._dispatchers[0]._stopping)
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
    assert groups_pb2.FINISH_REASON_ABORTED not in {s.finish_reason for s in returned[0].continuation.header.samples}


async def test_finished_samples_of_a_continuation_are_not_generated_again(fake: FakeService, tmp_path: Path) -> None:
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


async def test_killed_service_that_comes_back_loses_nothing(fake: FakeService, tmp_path: Path) -> None:
    await fake.submit(*(task(f"t{i}", max_new_tokens=40) for i in range(40)))
    simulated = SimulatedOptions(tokens_per_s=100.0, length_median=30.0)
    async with working(fake, tmp_path, simulated=simulated) as running:
        for done in (5, 15, 25):
            await fake.until(lambda done=done: len(fake.results()) >= done)
            await fake.stop()
            await time_passes(0.3)
            await fake.start()
        await fake.until(all_done(fake))
        assert not running.running.done()
    assert given_back(fake, tasks_pb2.RETURN_KIND_FAILED) == []


async def test_lost_lease_stops_its_generation(fake: FakeService, tmp_path: Path) -> None:
    fake.ttl_ms = 300
    await fake.submit(task("t1", max_new_tokens=5_000))
    async with working(fake, tmp_path, simulated=SLOW, groups_per_engine=1) as running:
        await fake.until(lambda: bool(fake.extends))
        fake.lost_leases.add("t1/0/1")
        await fake.submit(task("t2", max_new_tokens=4))
        await fake.until(lambda: "t2" in fake.results())
        assert set(running.engine._decoding) == set()
        assert running.worker.counters.leases_lost == 1
    assert fake.returns == []


async def test_cancelled_lease_stops_its_generation_soon_after_the_publish(fake: FakeService, tmp_path: Path) -> None:
    fake.ttl_ms = 600_000
    await fake.submit(task("t1", max_new_tokens=5_000))
    async with working(fake, tmp_path, simulated=SLOW, groups_per_engine=1) as running:
        await eventually(lambda: bool(running.engine._decoding))
        fake.cancelled_leases.add("t1/0/1")
        await fake.submit(task("t2", max_new_tokens=4))
        # The next regular heartbeat is minutes away.
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(lambda: "t2" in fake.results())
        assert set(running.engine._decoding) == set()
        counters = running.worker.counters
        assert (counters.leases_cancelled, counters.leases_lost) == (1, 0)
    assert fake.returns == []
    assert "t1" not in fake.results()


@pytest.mark.parametrize(("end", "pushed"), [("cancelled", False), ("lost", True)])
async def test_group_that_is_being_scored_is_pushed_unless_its_lease_was_cancelled(
    fake: FakeService, tmp_path: Path, end: str, pushed: bool
) -> None:
    scoring, release = asyncio.Event(), asyncio.Event()

    async def reward(sample: RewardInput) -> float:
        if sample.task_id == "t1":
            scoring.set()
            await release.wait()
        return 1.0

    fake.ttl_ms = 300
    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=reward) as running:
        await scoring.wait()
        (fake.cancelled_leases if end == "cancelled" else fake.lost_leases).add("t1/0/1")
        seen = len(fake.extends)
        await fake.until(lambda: len(fake.extends) > seen)
        await fake.submit(task("t2"))
        await fake.until(lambda: "t2" in fake.results())
        release.set()
        if pushed:
            await fake.until(lambda: "t1" in fake.results())
        assert running.worker.counters.leases_cancelled == (0 if pushed else 1)
    assert ("t1" in fake.results()) == pushed
    assert fake.returns == []


async def test_idle_worker_waits_politely_while_the_run_drains(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.dispatcher._WARN_AFTER_S", 0.1)
    monkeypatch.setattr("rollout_workers.dispatcher._AFTER_HELD_ANSWER_S", 0.1)
    fake.wait, fake.holds = tasks_pb2.LEASE_WAIT_DRAINING, False
    with structlog.testing.capture_logs() as logs:
        async with working(fake, tmp_path) as running:
            await fake.until(lambda: len(fake.lease_requests) >= 5)
            assert "being drained" in running.worker._dispatchers[0].waiting_on
            # Continued: there is work again.
            await fake.submit(task("t1"))
            await fake.until(all_done(fake))
            assert running.worker.counters.last_error == ""
    assert not [line for line in logs if line["log_level"] in ("warning", "error")]


# ── what goes wrong ──────────────────────────────────────────────────────────


async def failed_return(fake: FakeService) -> tasks_pb2.LeaseReturn:
    await fake.until(lambda: bool(given_back(fake, tasks_pb2.RETURN_KIND_FAILED)))
    return given_back(fake, tasks_pb2.RETURN_KIND_FAILED)[0]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"prompt_token_ids": [1, 5_000]}, "prompt_token_ids is 'token id 5000'"),
        ({"messages": [tasks_pb2.ChatMessage(role="user", content="hi")]}, "messages need a tokenizer"),
    ],
)
async def test_prompt_that_cannot_be_used_fails_its_task_alone(
    fake: FakeService, tmp_path: Path, bad: dict[str, Any], error: str
) -> None:
    await fake.submit(task("bad", **bad), task("good"))
    async with working(fake, tmp_path):
        returned = await failed_return(fake)
        await fake.until(lambda: "good" in fake.results())
    assert returned.lease_id == "bad/0/1"
    assert error in returned.error
    assert not returned.HasField("continuation")


async def test_failed_reward_keeps_the_samples(fake: FakeService, tmp_path: Path) -> None:
    def reward(sample: RewardInput) -> float:
        raise ValueError("no answer in the metadata")

    await fake.submit(task("t1"))
    async with working(fake, tmp_path, reward=reward) as running:
        returned = await failed_return(fake)
        assert running.worker.counters.last_error == returned.error
    assert "for sample 0: ValueError: no answer in the metadata" in returned.error
    assert len(returned.continuation.header.samples) == 4


async def test_invalid_group_fails_its_task_with_the_services_error(fake: FakeService, tmp_path: Path) -> None:
    fake.outcomes.append(groups_pb2.PUSH_OUTCOME_INVALID)
    await fake.submit(task("t1"), task("t2"))
    async with working(fake, tmp_path):
        returned = await failed_return(fake)
        await fake.until(lambda: len(fake.results()) == 1)
    assert returned.error == "the group breaks a rule"
    assert not returned.HasField("continuation")


async def test_engine_that_dies_fails_its_tasks_and_works_again_when_it_is_back(
    fake: FakeService, tmp_path: Path
) -> None:
    await fake.submit(task("t1", max_new_tokens=5_000))
    files = weight_files(tmp_path / "v1", {"model": b"1"})
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
    async with working(fake, tmp_path, simulated=SLOW) as running:
        await eventually(lambda: bool(running.engine._decoding))
        await running.engine.die()
        returned = await failed_return(fake)
        assert "it died" in returned.error
        asked = len(fake.lease_requests)
        await fake.submit(task("t2", max_new_tokens=4))
        await time_passes(0.3)
        # The dead engine is given nothing, however many tasks wait: at most the request under way brings one.
        assert len(fake.lease_requests) <= asked + 1
        assert not fake.tasks["t2"].failed
        await running.engine.revive()
        await fake.until(lambda: "t2" in fake.results())
    spans = fake.results()["t2"].header.samples[0].spans
    assert [span.version.version for span in spans] == [1]


async def test_engine_that_was_started_anew_between_two_probes_is_loaded_again(
    fake: FakeService, tmp_path: Path
) -> None:
    files = weight_files(tmp_path / "v1", {"model": b"1"})
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: bool(fake.lease_requests))
        await running.engine.revive()
        running.worker.slots[0].failed(EngineUnavailable("e", "generating", "Server disconnected"), suspect=True)
        await fake.until(lambda: fake.reports[-1].reloads == 2)
        await fake.submit(task("t1"))
        await fake.until(all_done(fake))
    assert [span.version.version for span in fake.results()["t1"].header.samples[0].spans] == [1]


async def test_continuation_waits_for_an_engine_that_is_behind_its_weights(fake: FakeService, tmp_path: Path) -> None:
    files = weight_files(tmp_path / "v1", {"model": b"1"})
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
    await fake.submit(task("t1", max_new_tokens=40))
    slow = SimulatedOptions(tokens_per_s=40.0, length_median=40.0, length_sigma=0.0)
    async with working(fake, tmp_path, simulated=slow) as first:
        await fake.until(lambda: bool(fake.tasks["t1"].leased_to))
        await time_passes(0.3)
        await first.end()
    assert fake.tasks["t1"].continuation is not None
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


async def test_service_that_never_answers_ends_the_worker(fake: FakeService, tmp_path: Path) -> None:
    await fake.stop()
    made = options(fake.address, tmp_path, service_timeout_s=0.5)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(Worker(made).run(), 20)
    faults = caught.value.exceptions
    assert {getattr(fault, "reason", "") for fault in faults} == {"service_unreachable"}
    assert any("waiting on the service at" in note for fault in faults for note in getattr(fault, "__notes__", ()))


async def test_engine_that_never_comes_ends_the_worker(fake: FakeService, tmp_path: Path) -> None:
    made = options(fake.address, tmp_path, simulated=None, engine_urls=("http://127.0.0.1:9",), engine_timeout_s=0.3)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(Worker(made).run(), 20)
    assert "not ready after 0.3 s" in str(caught.value.exceptions[0])


async def test_lost_engines_end_the_worker_when_none_comes_back(fake: FakeService, tmp_path: Path) -> None:
    made = options(fake.address, tmp_path, engine_timeout_s=0.3)
    host = SimulatedHost(0, made)
    worker = Worker(made, hosts=[host])
    running = asyncio.create_task(worker.run())
    await fake.until(lambda: bool(fake.lease_requests))
    await host.engine.die()
    worker.slots[0].failed(EngineUnavailable("e", "probing", "it died"), suspect=True)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 20)
    assert "no engine was reachable for 0.3 s" in str(caught.value.exceptions[0])


async def test_engine_is_reported_from_its_start_to_its_end(fake: FakeService, tmp_path: Path) -> None:
    async with working(fake, tmp_path) as running:
        await fake.until(lambda: any(r.state == weights_pb2.ENGINE_STATE_READY for r in fake.reports))
        running.engine.fail_next_loads(1)
        files = weight_files(tmp_path / "v1", {"model": b"1"})
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        await fake.until(lambda: fake.reports[-1].reloads == 1)
    last = fake.reports[-1]
    assert (last.engine_id, last.worker_id, last.loaded.version, last.errors) == ("w.e0", "w", 1, 1)
    assert "a fault was injected" in last.last_error
    assert last.last_reload_ms > 0
    assert last.state == weights_pb2.ENGINE_STATE_STOPPED


async def test_idle_engine_says_on_whom_it_waits(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.dispatcher._WARN_AFTER_S", 0.2)
    with structlog.testing.capture_logs() as logs:
        async with working(fake, tmp_path, lease_wait_s=0.1, progress_every_s=0.2) as running:
            await fake.until(lambda: len(fake.lease_requests) >= 6)
            assert running.worker.counters.last_error == ""
    idle = [line for line in logs if line["event"] == "no work"]
    assert idle
    assert all(line["waiting_on"] == "the trainer's feeder: no task is pending" for line in idle)
    progress = [line for line in logs if line["event"] == "progress"]
    assert progress
    assert progress[-1]["loaded"] == "1.0"
    assert "the trainer's feeder" in progress[-1]["waiting_on"]


async def test_fault_of_the_worker_over_one_task_fails_that_task_alone(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Scorer.score

    async def score(self: Scorer, progress: GroupProgress, indices: Sequence[int]) -> Scores:
        if progress.task.task_id == "bad":
            raise ZeroDivisionError("a bug")
        return await original(self, progress, indices)

    monkeypatch.setattr(Scorer, "score", score)
    await fake.submit(task("bad"), task("good"))
    async with working(fake, tmp_path):
        returned = await failed_return(fake)
        await fake.until(lambda: "good" in fake.results())
    assert returned.error == "ZeroDivisionError: a bug"
