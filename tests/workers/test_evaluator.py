"""The evaluator of one engine: what it leases when, and how long it keeps the engine's weights."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.counters import Counters
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import SampleRequest
from rollout_workers.generation.limits import Limits, LimitsOfTasks
from rollout_workers.generation.prompts import Prompts
from rollout_workers.rewards import Scorer
from rollout_workers.service.client import WaitLog
from rollout_workers.service.parcels import PushResult
from rollout_workers.slots.inflight import InflightLimit
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.dispatcher import Dispatcher
from rollout_workers.tasks.evaluator import Evaluator
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.tasks.tools import Tools
from rollout_workers.versions import BASE, Version
from tests.workers.building import length_reward, task

NEWER = Version(1, 1)


class Calls:
    """The service, as far as an evaluator needs it: pending tasks of one version, and what became of them."""

    address = "fake:1"

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.pending: list[str] = []
        self.version = BASE
        self.asked: list[tuple[str, int, float]] = []
        """Request ids, tasks asked for, waits."""
        self.loaded: list[Version] = []
        """Versions that the requests named."""
        self.granted: dict[str, list[tasks_pb2.Lease]] = {}
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
        self,
        holder: str,
        request_id: str,
        loaded: Version,
        *,
        max_tasks: int,
        wait_s: float,
        sink: int,
        would_load: bool,
    ) -> tasks_pb2.LeaseTasksResponse:
        assert sink == tasks_pb2.TASK_SINK_EVALUATIONS
        self.asked.append((request_id, max_tasks, wait_s))
        self.loaded.append(loaded)
        if request_id not in self.granted:
            if wait_s and not self._given(loaded):
                async with asyncio.timeout(30):
                    await self.changed.wait()
            if leases := [self._lease(name) for name in self._given(loaded)[:max_tasks]]:
                self.granted[request_id] = leases
                del self.pending[: len(leases)]
        if self.lose_reply and wait_s:
            await asyncio.Event().wait()
        return tasks_pb2.LeaseTasksResponse(leases=self.granted.get(request_id, []))

    def _given(self, loaded: Version) -> list[str]:
        return list(self.pending) if loaded == self.version else []

    def _lease(self, name: str) -> tasks_pb2.Lease:
        lease_id = f"e@1.{name}/0/1"
        return tasks_pb2.Lease(
            lease_id=lease_id, task=task(name, group_size=1), pinned=self.version.wire(), attempt=1, ttl_ms=60_000
        )

    async def extend(self, holder: str, lease_ids: list[str], *, timeout_s: float) -> tasks_pb2.ExtendLeasesResponse:
        return tasks_pb2.ExtendLeasesResponse(states=[tasks_pb2.LEASE_STATE_LIVE] * len(lease_ids), ttl_ms=60_000)

    async def give_back(self, holder: str, returns: Sequence[tasks_pb2.LeaseReturn]) -> tasks_pb2.ReturnLeasesResponse:
        assert not any(back.HasField("partial_rollout") for back in returns)
        self.returned += [(back.lease_id, back.kind) for back in returns]
        return tasks_pb2.ReturnLeasesResponse(outcomes=[tasks_pb2.RETURN_OUTCOME_PENDING] * len(returns))

    async def push(self, header: groups_pb2.GroupHeader, payload: Sequence[bytes]) -> PushResult:
        """Take a result, in the place of the pusher."""
        self.groups.append(groups_pb2.Group(header=header, payload=b"".join(payload)))
        self.counters.pushed["recorded"] += 1
        return PushResult("recorded")


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
    counters = Counters()
    calls = Calls(counters)
    scorer = Scorer(length_reward, Prompts(None), name="r", timeout_s=5, threads=1, decode=False)
    tools = Tools("w", Prompts(None), scorer, calls, counters, LimitsOfTasks(Limits(30.0, 30.0, 2), {}))  # type: ignore[arg-type]
    values: dict[str, Any] = {"concurrency": 2, "lease_wait_s": 10.0, **more}
    keeper = LeaseKeeper(slot.engine_id, calls)  # type: ignore[arg-type]
    evaluator = Evaluator(slot, calls, keeper, tools, hold_s=hold_s, **values)  # type: ignore[arg-type]
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
    assert at.counters.pushed["recorded"] == 3
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
            ("e@1.a/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED),
            ("e@1.b/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED),
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
        await at.until(lambda: at.calls.returned == [("e@1.a/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED)])
        assert at.evaluator.held == 0


async def test_a_hand_back_that_was_broken_off_is_made_up_for_by_the_next_request() -> None:
    async with bench() as at:
        give_back, began = at.calls.give_back, asyncio.Event()

        async def hangs(*_: Any) -> tasks_pb2.ReturnLeasesResponse:
            began.set()
            return await asyncio.Future()

        at.calls.give_back = hangs  # type: ignore[assignment, method-assign]
        await at.until(lambda: len(at.calls.asked) == 1)
        at.load(NEWER)
        at.calls.submit("a")
        await began.wait()
        at.calls.give_back = give_back  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            await at.evaluator.released()
        assert at.calls.returned == [("e@1.a/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED)]
        assert at.evaluator.held == 0


async def test_stopping_hands_back_what_is_not_made() -> None:
    async with bench(tokens_per_s=1.0) as at:
        at.calls.submit("a")
        await at.until(lambda: at.evaluator.held == 1)
    assert at.calls.returned == [("e@1.a/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED)]


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
        tools: Any = SimpleNamespace(spread=None, surplus_samples=0)
        limit = InflightLimit(at.slot, 2)
        dispatcher = Dispatcher(at.slot, service, unused, tools, limit=limit, lease_wait_s=1.0)
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


async def test_a_request_that_was_broken_off_is_repeated_as_it_was_when_the_weights_have_changed() -> None:
    async with bench() as at:
        at.calls.lose_reply = True
        await at.until(lambda: len(at.calls.asked) == 1)
        at.calls.submit("a")
        await at.until(lambda: not at.calls.pending)
        at.evaluator._yielding += 1
        at.evaluator._changes.notify()
        await asyncio.sleep(0.05)
        at.load(NEWER)
        at.calls.lose_reply = False
        at.evaluator._yielding -= 1
        at.evaluator._changes.notify()
        await at.until(lambda: len(at.calls.asked) == 3)
        assert [(asked[0], at.calls.loaded[place]) for place, asked in enumerate(at.calls.asked)] == [
            ("v1", BASE),
            ("v1", BASE),
            ("v2", NEWER),
        ]
        assert at.calls.returned == [("e@1.a/0/1", tasks_pb2.RETURN_KIND_INTERRUPTED)]
