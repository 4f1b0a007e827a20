"""policy.wait_replicas against a real primary and replica: what waits, for how long, and who does not."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain.inspection import TaskSet
from buffer_service.domain.policy import RunPolicy
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import NotReplicated, StaleTerm
from tests.store.driver import Run
from tests.support.sentinels import Pair, pair

pytestmark = pytest.mark.faults

TIMEOUT_MS = 100


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with pair() as running:
        yield running


@pytest.fixture
async def run(servers: Pair) -> AsyncIterator[Run]:
    servers.primary.ask("FLUSHALL")
    store = await RedisRunStore.connect(servers.primary.url, timeout_s=10)
    yield Run(store)
    await store.close()


@pytest.fixture
def halted(servers: Pair) -> Iterator[Callable[[], None]]:
    """Halts the replica until the end of the test."""
    yield servers.replica.halt
    servers.replica.go_on()
    # The next test begins with a replica that has everything.
    servers.replica.until(servers.is_in_step, "the replica has caught up")


async def waited(run: Run, **policy: Any) -> None:
    await run.create(wait_replicas=1, wait_timeout_ms=TIMEOUT_MS, **policy)


async def not_replicated(operation: Awaitable[object]) -> None:
    began = time.monotonic()
    with pytest.raises(NotReplicated) as failure:
        await operation
    assert failure.value.attributes == {"wanted": "1", "reached": "0", "timeout_ms": str(TIMEOUT_MS)}
    assert failure.value.retryable
    assert TIMEOUT_MS / 1000 - 0.01 <= time.monotonic() - began < 5


Operation = Callable[[Run], Awaitable[object]]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda run: run.submit("x", request_id="same"), id="submit"),
        pytest.param(lambda run: run.lease(request_id="same"), id="lease"),
        pytest.param(lambda run: run.store.call(commands.extend(run.run_id, "w", "i", [])), id="extend"),
        pytest.param(lambda run: run.store.call(commands.give_back(run.run_id, "w", "i", [])), id="give_back"),
        pytest.param(lambda run: run.push(run.group("x")), id="push"),
        pytest.param(lambda run: run.pull(0), id="pull"),
        pytest.param(lambda run: run.commit(0), id="commit"),
        pytest.param(lambda run: run.publish(1), id="publish"),
        pytest.param(lambda run: run.checkpoint(-1), id="checkpoint"),
        pytest.param(lambda run: run.resume(0, request_id="same"), id="resume"),
        pytest.param(lambda run: run.store.call(commands.weights(run.run_id)), id="weights"),
        pytest.param(waited, id="create_run"),
    ],
)
async def test_every_acknowledgement_and_every_repeat_of_it_waits(
    run: Run, operation: Operation, halted: Callable[[], None]
) -> None:
    await waited(run)
    await run.fill("a", "b")
    await run.batch(0)
    halted()
    # The second time there is nothing to write: what is waited for was written the first time.
    await not_replicated(operation(run))
    await not_replicated(operation(run))


async def test_once_the_replica_is_back_the_same_request_is_acknowledged(
    run: Run, servers: Pair, halted: Callable[[], None]
) -> None:
    await waited(run)
    halted()
    await not_replicated(run.push(run.group("a")))
    servers.replica.go_on()
    assert await until_replicated(run) == ["duplicate"]
    assert await run.ledger() == {"accepted": 1, "queued": 1}
    await run.check()


async def test_a_written_payload_is_on_the_replica_before_its_push_is_acknowledged(
    run: Run, servers: Pair, halted: Callable[[], None]
) -> None:
    await waited(run)
    halted()
    written = await run.write(run.group("a"))
    await not_replicated(run.push(written))
    # Decided all the same, and not answered: the repeated push waits for what the first one wrote.
    assert await run.ledger() == {"accepted": 1, "queued": 1}
    await not_replicated(run.push(written))
    servers.replica.go_on()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert await run.push_kinds(written) == ["queued"]
            break
        except NotReplicated:
            assert time.monotonic() < deadline
    assert servers.replica.ask(f"PTTL {run.key_of(written)}").startswith(":-1\r\n")
    assert servers.replica.ask(f"STRLEN {run.key_of(written)}").startswith(":4\r\n")
    assert await run.ledger() == {"accepted": 1, "queued": 1}
    await run.check()


async def until_replicated(run: Run) -> list[str]:
    deadline = time.monotonic() + 10
    while True:
        try:
            return await run.push_kinds(run.group("a"))
        except NotReplicated:
            assert time.monotonic() < deadline


async def test_a_push_that_is_not_replicated_leaves_nothing_in_the_line_of_blocked_ones(
    run: Run, halted: Callable[[], None]
) -> None:
    await waited(run, max_queued_groups=2, overflow_action="block")
    await run.fill("a")
    halted()
    await not_replicated(run.push(run.group("b"), run.group("blocked")))
    assert await run.ledger() == {"accepted": 2, "queued": 2}
    assert await run.members("waiting") == []
    assert await run.members("staging") == []
    await run.check()


async def test_a_refusal_acknowledges_nothing_and_waits_for_nobody(run: Run, halted: Callable[[], None]) -> None:
    await waited(run)
    run.term = 2
    halted()
    with pytest.raises(StaleTerm):
        await run.commit(0)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda run: run.view(), id="view"),
        pytest.param(
            lambda run: run.store.call(commands.evaluations(run.run_id, acknowledges=False)), id="evaluations"
        ),
        pytest.param(lambda run: run.store.waits(run.run_id, 10), id="waits"),
        pytest.param(lambda run: run.store.call(commands.task(run.run_id, "a")), id="task"),
        pytest.param(lambda run: run.store.call(commands.list_steps(run.run_id, (), 10)), id="list_steps"),
        pytest.param(
            lambda run: run.store.call(commands.list_groups(run.run_id, None, (), 10, environment=None)),
            id="list_groups",
        ),
        pytest.param(
            lambda run: run.store.call(
                commands.list_tasks(run.run_id, TaskSet.ENDED, (), 10, environment=None, worker_id="")
            ),
            id="list_tasks",
        ),
    ],
)
async def test_a_look_waits_for_nobody(run: Run, look: Operation, halted: Callable[[], None]) -> None:
    await waited(run)
    await run.fill("a")
    halted()
    await look(run)


async def test_runs_that_want_no_replicas_are_not_held_up(run: Run, halted: Callable[[], None]) -> None:
    await run.create(wait_replicas=1, wait_timeout_ms=3_000)
    other = Run(run.store, "other")
    await other.create()
    halted()
    held_up = asyncio.create_task(run.push(run.group("a")))
    for number in range(10):
        await other.fill(f"x{number}")
    assert not held_up.done()
    with pytest.raises(NotReplicated):
        await held_up


async def test_waits_that_begin_together_end_together(run: Run, halted: Callable[[], None]) -> None:
    await waited(run, max_queued_groups=100)
    halted()
    began = time.monotonic()
    await asyncio.gather(*(not_replicated(run.push(run.group(f"x{number}"))) for number in range(50)))
    assert time.monotonic() - began < 50 * TIMEOUT_MS / 1000 / 2


async def test_a_changed_policy_is_noticed_by_other_processes_within_a_second(
    run: Run, servers: Pair, halted: Callable[[], None]
) -> None:
    await run.create()
    other = await RedisRunStore.connect(servers.primary.url, timeout_s=10)
    await other.call(commands.extend(run.run_id, "w", "i", []))
    policy = RunPolicy(batch_groups=2, wait_replicas=1, wait_timeout_ms=TIMEOUT_MS)
    await run.store.call(commands.update_policy(run.run_id, policy))
    changed = time.monotonic()
    halted()
    await not_replicated(run.store.call(commands.extend(run.run_id, "w", "i", [])))
    while True:
        asked = time.monotonic()
        try:
            await other.call(commands.extend(run.run_id, "w", "i", []))
            assert asked - changed < 1
        except NotReplicated:
            break
    await other.close()
