"""The evaluator of one engine: what it leases when, and how long it keeps the engine's weights."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import evaluations_pb2 as pb
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.counters import Counters
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import SampleRequest
from rollout_workers.generation.prompts import Prompts
from rollout_workers.rewards import Scorer
from rollout_workers.service.client import WaitLog
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.dispatcher import Dispatcher
from rollout_workers.tasks.evaluator import Evaluator
from rollout_workers.tasks.work import Tools
from rollout_workers.versions import BASE, Version
from tests.workers.building import length_reward, task

NEWER = Version(1, 1)


class Calls:
    """The service, as far as an evaluator needs it: pending tasks of one version, and what became of them."""

    address = "fake:1"

    def __init__(self) -> None:
        self.pending: list[str] = []
        self.version = BASE
        self.asked: list[tuple[str, int, float]] = []
        """Request ids, tasks asked for, waits."""
        self.granted: dict[str, list[pb.EvaluationLease]] = {}
        self.groups: list[groups_pb2.Group] = []
        self.returned: list[tuple[str, int]] = []
        self.lose_reply = False
        """The next request that waits is granted what comes, but nobody hears of it."""
        self.changed = asyncio.Event()

    def submit(self, *names: str) -> None:
        self.pending += names
        self.changed.set()
        self.changed = asyncio.Event()

    def wait_log(self, what: str) -> WaitLog:
        return WaitLog(what)

    async def lease(
        self, holder: str, request_id: str, loaded: Version, *, max_tasks: int, wait_s: float, would_load: bool
    ) -> pb.LeaseEvaluationResponse:
        self.asked.append((request_id, max_tasks, wait_s))
        if request_id not in self.granted:
            if wait_s and not self._given(loaded):
                async with asyncio.timeout(30):
                    await self.changed.wait()
            if leases := [self._lease(name) for name in self._given(loaded)[:max_tasks]]:
                self.granted[request_id] = leases
                del self.pending[: len(leases)]
        if self.lose_reply and wait_s:
            await asyncio.Event().wait()
        return pb.LeaseEvaluationResponse(leases=self.granted.get(request_id, []))

    def _given(self, loaded: Version) -> list[str]:
        return list(self.pending) if loaded == self.version else []

    def _lease(self, name: str) -> pb.EvaluationLease:
        lease_id = f"e/1/{name}/1"
        return pb.EvaluationLease(
            lease_id=lease_id, task=task(name, group_size=1), version=self.version.wire(), attempt=1, ttl_ms=60_000
        )

    async def extend(self, holder: str, lease_ids: list[str], *, timeout_s: float) -> pb.ExtendEvaluationResponse:
        return pb.ExtendEvaluationResponse(states=[tasks_pb2.LEASE_STATE_LIVE] * len(lease_ids), ttl_ms=60_000)

    async def finish(self, holder: str, lease_id: str, group: groups_pb2.Group) -> int:
        self.groups.append(group)
        return pb.EVALUATION_OUTCOME_ACCEPTED

    async def hand_back(self, holder: str, lease_id: str, kind: int, error: str = "") -> int:
        self.returned.append((lease_id, kind))
        return pb.EVALUATION_OUTCOME_PENDING


@dataclasses.dataclass
class Bench:
    """One engine, its evaluator at work, and the service."""

    slot: EngineSlot
    calls: Calls
    evaluator: Evaluator
    counters: Counters

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - over state of many kinds
                await asyncio.sleep(0.005)

    def load(self, version: Version) -> None:
        self.slot.adopt(version)


@asynccontextmanager
async def bench(*, tokens_per_s: float = 2_000.0, hold_s: float = 20.0, **more: Any) -> AsyncIterator[Bench]:
    engine = SimulatedEngine(
        SimulatedEngineOptions(tokens_per_s=tokens_per_s, answers=AnswerOptions(length_median=8.0)), address="sim://0"
    )
    slot = EngineSlot("w.e0", engine, await engine.info(), base_model=None)
    slot.adopt(slot.loaded)
    calls, counters = Calls(), Counters()
    scorer = Scorer(length_reward, Prompts(None), name="r", timeout_s=5, threads=1, decode=False)
    tools = Tools("w", Prompts(None), scorer, None, Counters(), 30.0, 2)  # type: ignore[arg-type]
    values: dict[str, Any] = {"concurrency": 2, "lease_wait_s": 10.0, **more}
    evaluator = Evaluator(slot, calls, tools, hold_s=hold_s, counters=counters, **values)  # type: ignore[arg-type]
    slot.hold = evaluator
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(evaluator.run())
            yield Bench(slot, calls, evaluator, counters)
            evaluator.stop()
            async with asyncio.timeout(20):
                await asyncio.wait([running])
    finally:
        await scorer.close()


async def test_tasks_are_made_and_their_groups_go_to_the_evaluation() -> None:
    async with bench() as at:
        at.calls.submit("a", "b", "c")
        await at.until(lambda: len(at.calls.groups) == 3)
        assert sorted(group.header.task_id for group in at.calls.groups) == ["a", "b", "c"]
        assert at.calls.asked[0][1] == 2
        await at.until(lambda: at.evaluator.held == 0)
        assert at.slot.evaluating == 0
    assert at.counters.pushed["queued"] == 3
    assert at.counters.tokens == at.counters.tokens_pushed > 0


async def test_task_that_its_engine_cannot_sample_fails_alone_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(self: SimulatedEngine, request: SampleRequest) -> None:
        raise InvalidField("top_p", 0.9, "1 on this engine")

    monkeypatch.setattr(SimulatedEngine, "check_sampling", check)
    async with bench() as at:
        at.calls.submit("a")
        await at.until(lambda: bool(at.calls.returned))
        assert at.slot.leasable
    assert {kind for _, kind in at.calls.returned} == {tasks_pb2.RETURN_KIND_FAILED}
    assert "top_p" in at.counters.last_error


async def test_weights_go_at_once_when_nothing_is_evaluated() -> None:
    async with bench() as at:
        await at.until(lambda: len(at.calls.asked) == 1)
        async with asyncio.timeout(5):
            await at.evaluator.released()
        # The service was asked once more, without waiting, by the name of the request that was broken off.
        assert [(asked[0], asked[2]) for asked in at.calls.asked[:2]] == [("v1", 10.0), ("v1", 0.0)]
        assert not at.evaluator.active


async def test_what_a_broken_off_request_was_granted_is_found_and_holds_the_weights() -> None:
    async with bench(tokens_per_s=40.0) as at:
        at.calls.lose_reply = True
        await at.until(lambda: len(at.calls.asked) == 1)
        at.calls.submit("a")
        await at.until(lambda: not at.calls.pending)
        at.calls.lose_reply = False
        async with asyncio.timeout(20):
            await at.evaluator.released()
        assert not at.evaluator.active
        at.load(NEWER)
    assert [group.header.task_id for group in at.calls.groups] == ["a"]
    assert at.calls.returned == []


async def test_the_weights_stay_until_all_that_is_pending_is_made() -> None:
    async with bench(tokens_per_s=200.0) as at:
        at.calls.submit("a", "b", "c", "d", "e")
        await at.until(lambda: at.evaluator.held == 2)
        async with asyncio.timeout(20):
            await at.evaluator.released()
        assert at.calls.pending == []
        at.load(NEWER)
    assert len(at.calls.groups) == 5


async def test_the_hold_ends_and_what_is_on_the_engine_goes_back() -> None:
    async with bench(tokens_per_s=1.0, hold_s=0.2) as at:
        at.calls.submit("a", "b", "c")
        await at.until(lambda: at.evaluator.held == 2)
        async with asyncio.timeout(15):
            await at.evaluator.released()
        assert not at.evaluator.active
        assert sorted(at.calls.returned) == [
            ("e/1/a/1", tasks_pb2.RETURN_KIND_INTERRUPTED),
            ("e/1/b/1", tasks_pb2.RETURN_KIND_INTERRUPTED),
        ]
        # Nothing more is leased for weights that are to go.
        assert at.calls.pending == ["c"]
        assert at.counters.tokens == sum(at.counters.tokens_discarded.values())


async def test_work_whose_weights_are_gone_goes_back() -> None:
    async with bench(tokens_per_s=1.0) as at:
        at.calls.submit("a")
        await at.until(lambda: at.evaluator.held == 1)
        at.load(NEWER)
        await at.until(lambda: len(at.calls.returned) == 1)
        assert at.calls.groups == []


async def test_a_lease_that_comes_when_the_weights_are_gone_goes_back_at_once() -> None:
    async with bench() as at:
        await at.until(lambda: len(at.calls.asked) == 1)
        at.load(NEWER)
        at.calls.submit("a")
        await at.until(lambda: at.calls.returned == [("e/1/a/1", tasks_pb2.RETURN_KIND_INTERRUPTED)])
        assert at.evaluator.held == 0


async def test_stopping_hands_back_what_is_not_made() -> None:
    async with bench(tokens_per_s=1.0) as at:
        at.calls.submit("a")
        await at.until(lambda: at.evaluator.held == 1)
    assert at.calls.returned == [("e/1/a/1", tasks_pb2.RETURN_KIND_INTERRUPTED)]


@pytest.mark.parametrize("labels", [[BASE, NEWER], [NEWER]])
async def test_a_group_with_tokens_of_other_weights_is_never_sent(labels: list[Version]) -> None:
    async with bench(tokens_per_s=1.0) as at:
        at.calls.submit("a")
        await at.until(lambda: at.evaluator.held == 1)
        spans = [groups_pb2.VersionSpan(version=version.wire(), start=i, end=i + 1) for i, version in enumerate(labels)]
        header = groups_pb2.GroupHeader(
            task_id="a", lease_id="e/1/a/1", samples=[groups_pb2.Sample(tokens=2, spans=spans)]
        )
        result = await at.evaluator._tools.pusher.push(header, b"")
        assert result.outcome == "refused"
        assert "1.0 is evaluated" in str(result.error)
        assert at.calls.groups == []


async def test_training_asks_for_nothing_when_evaluations_took_the_engine_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as at:
        asked: list[int] = []

        class Service:
            async def lease(self, *_: object, max_tasks: int, **__: object) -> None:
                asked.append(max_tasks)
                await asyncio.Event().wait()

        unused: Any = None
        service: Any = Service()
        dispatcher = Dispatcher(at.slot, service, unused, unused, concurrency=2, outstanding=8, lease_wait_s=1.0)
        looked = asyncio.Event()

        async def fit_but_slow() -> bool:
            if not looked.is_set():
                at.slot.evaluating = 2
                looked.set()
            return True

        monkeypatch.setattr(dispatcher, "_is_fit", fit_but_slow)
        running = asyncio.create_task(dispatcher.run())
        await looked.wait()
        at.slot.evaluating = 1
        dispatcher.look_again()
        await at.until(lambda: bool(asked))
        assert asked == [1]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
