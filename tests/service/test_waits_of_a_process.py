"""Lines, drain and byte budget of one rpc process, without any RPC."""

import asyncio
import contextlib
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from buffer_service.commands.replies import text, unpack
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.flow.budget import ByteBudget, StreamSlots
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.pushes import Pushes
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.janitor import Janitor
from buffer_wire.errors import NotReady
from buffer_wire.revision import NO_REVISION, Revision


class Notes:
    """Notifications that the test gives."""

    def __init__(self) -> None:
        self._ticket = 0
        self._changed = asyncio.Event()

    def ticket(self, run_id: str, topic: Topic) -> int:
        return self._ticket

    def lacks(self, run_id: str, groups: int) -> None:
        """Nobody pushes here."""

    def notify(self) -> None:
        self._ticket += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, run_id: str, topic: Topic, seen: int, timeout_s: float) -> int:
        if self._ticket <= seen:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self._ticket


class Shelf:
    """Things to be taken, as tries of the store would."""

    def __init__(self) -> None:
        self.things: list[str] = []
        self.tries: list[str] = []

    async def take(self, who: str) -> str:
        self.tries.append(who)
        await asyncio.sleep(0)
        return self.things.pop(0) if self.things else ""


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_only_the_head_of_a_line_tries_again() -> None:
    notes, drain, shelf = Notes(), Drain(), Shelf()
    lines = WaitingLines(notes, drain)
    async with asyncio.TaskGroup() as tasks:
        waits = []
        for who in "abc":
            waits.append(
                tasks.create_task(lines.until("r", Topic.TASKS, lambda who=who: shelf.take(who), bool, 30))  # type: ignore[misc]
            )
            await settled()
        assert shelf.tries == ["a", "b", "c"]
        shelf.things = ["first"]
        notes.notify()
        await settled()
        assert waits[0].result() == "first"
        assert shelf.tries[3:] == ["a", "b"]
        shelf.things = ["second", "third"]
        notes.notify()
    assert [wait.result() for wait in waits] == ["first", "second", "third"]
    assert not lines._lines


async def test_a_hint_between_the_try_and_the_wait_is_not_missed() -> None:
    notes, shelf = Notes(), Shelf()
    lines = WaitingLines(notes, Drain())
    tries = 0

    async def attempt() -> str:
        nonlocal tries
        tries += 1
        found = await shelf.take("a")
        if tries == 1:
            shelf.things.append("late")
            notes.notify()
        return found

    async with asyncio.timeout(0.9):  # Shorter than the second after which it looks again without a hint.
        assert await lines.until("r", Topic.TASKS, attempt, bool, 30) == "late"


async def test_whoever_is_not_at_the_head_when_its_time_is_up_tries_once_more() -> None:
    shelf = Shelf()
    lines = WaitingLines(Notes(), Drain())
    async with asyncio.TaskGroup() as tasks:
        head = tasks.create_task(lines.until("r", Topic.TASKS, lambda: shelf.take("head"), bool, 30))
        await settled()
        assert await lines.until("r", Topic.TASKS, lambda: shelf.take("other"), bool, 0.05) == ""
        assert shelf.tries.count("other") == 2
        assert not head.done()
        head.cancel()


async def test_lines_of_different_runs_do_not_wait_for_each_other() -> None:
    shelf = Shelf()
    lines = WaitingLines(Notes(), Drain())
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(lines.until("slow", Topic.TASKS, lambda: shelf.take("a"), bool, 30))
        await settled()
        shelf.things = ["thing"]
        assert await lines.until("fast", Topic.TASKS, lambda: shelf.take("b"), bool, 5) == "thing"
        assert not waiting.done()
        waiting.cancel()


async def test_a_drain_ends_waits_at_once_but_no_try() -> None:
    notes, drain, shelf = Notes(), Drain(), Shelf()
    lines = WaitingLines(notes, drain)
    trying, finish = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        trying.set()
        await finish.wait()
        return "granted"

    async with asyncio.TaskGroup() as tasks:
        in_try = tasks.create_task(lines.until("r", Topic.TASKS, slow, bool, 30))
        await trying.wait()
        waiting = [
            tasks.create_task(_refused(lines.until("other", Topic.TASKS, lambda: shelf.take("x"), bool, 30)))
            for _ in range(2)
        ]
        await settled()
        drain.begin()
        await settled()
        assert all(wait.done() for wait in waiting)
        assert not in_try.done()
        finish.set()
    assert in_try.result() == "granted"
    with pytest.raises(NotReady):
        async with drain.interruptible():
            raise AssertionError("nothing is waited for after a drain has begun")


async def _refused(wait: object) -> None:
    with pytest.raises(NotReady):
        await wait  # type: ignore[misc]


async def test_a_byte_budget_is_overdrawn_by_those_who_hold_nothing_only() -> None:
    budget = ByteBudget(100)
    budget.take(150)
    assert not budget.has_room
    mine = 150

    async def may_read(held: int) -> None:
        await budget.until(lambda: budget.has_room or not held)

    async with asyncio.timeout(1):
        await may_read(0)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(may_read(mine))
        await settled()
        assert not waiting.done()
        budget.give(40)
        await settled()
        assert not waiting.done()
        budget.give(20)
    assert budget.used_bytes == 90


async def test_one_stream_too_many_is_told_to_come_again() -> None:
    slots = StreamSlots(1)
    with slots.slot(""), pytest.raises(NotReady, match="max_streams"), slots.slot(""):
        pass
    with slots.slot("a"):
        pass


async def test_one_token_leaves_streams_to_the_others() -> None:
    slots = StreamSlots(3, per_token=2)
    with slots.slot("a"), slots.slot("a"):
        with pytest.raises(NotReady, match=r"token 'a'.*max_token_streams"), slots.slot("a"):
            pass
        with slots.slot("b"), pytest.raises(NotReady, match="max_streams"), slots.slot("c"):
            pass
    with slots.slot("a"), slots.slot("a"), slots.slot(""):
        pass


# ── pushes in a line ─────────────────────────────────────────────────────────

FACTS = ops.GroupFacts(
    task_id="t",
    incarnation=0,
    lease_id="",
    environment="",
    samples=1,
    tokens=1,
    loss_tokens=1,
    size_bytes=1,
    head=ops.WeightVersion(1),
    tail=ops.WeightVersion(1),
    spans_versions=False,
    mean_milli=0,
    equal_rewards=False,
    mean_reward_milli=0,
    response_lengths=bytes(4),
    rewards=bytes(4),
    min_response_tokens=1,
    max_response_tokens=1,
    response_tokens=0,
    reward_milli=0,
    turns=1,
    truncated_samples=0,
)


class FullStore:
    """Accepts `room` groups, first come, first served; blocks the rest, keeping their bodies under keys."""

    def __init__(self) -> None:
        self.room = 0
        self.line: list[str] = []
        self.accepted: list[str] = []
        self.abandoned: list[str] = []
        self.calls: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def push(
        self, run_id: str, groups: list[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        names = [group.facts.task_id for group in groups]
        await self.gate.wait()
        return self._judge(names)

    async def retry_push(self, run_id: str, groups: list[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        await self.gate.wait()
        return self._judge([key for _, key in groups])

    async def call(self, command: Command[None]) -> None:
        assert command.script == "abandon"
        payload_keys = [text(key) for key in unpack(command.arguments)[0]]
        self.abandoned += payload_keys
        self.line = [name for name in self.line if name not in payload_keys]

    def _judge(self, names: list[str]) -> ops.PushResult:
        self.calls.append(names)
        outcomes = []
        for name in names:
            if name not in self.line:
                self.line.append(name)
            if self.room and self.line[0] == name:
                self.room -= 1
                self.line.remove(name)
                self.accepted.append(name)
                outcomes.append(ops.Pushed(ops.PushKind.QUEUED, name))
            else:
                outcomes.append(ops.Pushed(ops.PushKind.BLOCKED, name, payload_key=name))
        return ops.PushResult(Revision(len(self.calls)), outcomes, ops.WeightVersion(1))


def pushes_on(store: FullStore) -> tuple[Pushes, Notes, Janitor]:
    notes, janitor = Notes(), Janitor(cast("RunStore", store))
    lines = WaitingLines(notes, Drain())
    return Pushes(cast("RunStore", store), lines, janitor, RpcMetrics(CollectorRegistry())), notes, janitor


def named(*names: str) -> list[ops.NewGroup]:
    return [ops.NewGroup(replace(FACTS, task_id=name), b"body") for name in names]


async def test_the_head_of_the_line_tries_for_all_whose_bodies_are_in_the_store() -> None:
    store = FullStore()
    pushes, notes, _ = pushes_on(store)
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        # All three are on their way to the store before any of them is answered.
        pushed = [named(*names) for names in ("ab", "c", "de", "f")]
        waiting = [tasks.create_task(pushes.push("r", groups, NO_REVISION)) for groups in pushed[:3]]
        await settled()
        store.gate.set()
        await settled()
        store.room = 1
        tasks.create_task(pushes.push("r", pushed[3], NO_REVISION))
        await settled()
        assert ["f"] in store.calls, "it gets its place in the line at once"
        assert not store.accepted, "and no room that others wait for"
        store.room = 4
        notes.notify()
        await settled()
        assert ["a", "b", "c", "d", "e", "f"] in store.calls
        assert store.accepted == ["a", "b", "c", "d"]
        assert waiting[0].done()
        assert waiting[1].done()
        assert not waiting[2].done()
        store.room = 1
        notes.notify()
        await settled()
        assert store.accepted == ["a", "b", "c", "d", "e"]
        store.room = 1
        notes.notify()
    assert store.accepted == list("abcdef")
    assert [group.outcome and group.outcome.group_id for group in pushed[2]] == ["d", "e"]
    assert [group.outcome and group.outcome.kind for group in pushed[3]] == [ops.PushKind.QUEUED]


async def test_nobody_is_overtaken_by_a_push_on_another_replica() -> None:
    store = FullStore()
    (here, notes, _), (there, other_notes, _) = pushes_on(store), pushes_on(store)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(here.push("r", named("a"), NO_REVISION))
        await settled()
        tasks.create_task(here.push("r", named("b"), NO_REVISION))
        await settled()
        tasks.create_task(there.push("r", named("c"), NO_REVISION))
        await settled()
        for accepted in ("a", "ab", "abc"):
            store.room = 1
            # The later one hears of the room first.
            other_notes.notify()
            await settled()
            notes.notify()
            await settled()
            assert store.accepted == list(accepted)


async def test_a_blocked_push_that_is_cancelled_has_its_payloads_deleted() -> None:
    store = FullStore()
    pushes, _, janitor = pushes_on(store)
    store.room = 1
    async with asyncio.TaskGroup() as tasks:
        deleting = tasks.create_task(janitor.delete_abandoned())
        blocked = tasks.create_task(pushes.push("r", named("a", "b", "c"), NO_REVISION))
        await settled()
        assert store.accepted == ["a"]
        blocked.cancel()
        await settled()
        assert store.abandoned == ["b", "c"]
        store.room = 1
        await pushes.push("r", named("d"), NO_REVISION)
        assert store.accepted == ["a", "d"]
        janitor.close()
        await deleting


async def test_what_the_store_blocks_of_a_push_that_was_cancelled_meanwhile_is_given_up() -> None:
    store = FullStore()
    pushes, _, janitor = pushes_on(store)
    store.room = 1
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        deleting = tasks.create_task(janitor.delete_abandoned())
        push = tasks.create_task(pushes.push("r", named("a", "b", "c"), NO_REVISION))
        await settled()
        push.cancel()
        await settled()
        store.gate.set()
        await settled()
        assert push.cancelled()
        assert (store.accepted, store.abandoned, store.line) == (["a"], ["b", "c"], [])
        janitor.close()
        await deleting
