"""A run's clock: it goes with the host's, never back, and never by a jump that nobody was there for."""

import time

from buffer_service.domain.policy import OverflowAction
from buffer_service.store.keys import index_key
from tests.store.driver import Run

STEP_MS = 2_000
"""Time by which it goes on at most from one look to the next."""

HOUR_MS = 3_600_000


class Clock:
    """The host's clock of a run whose own is not frozen any more."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    async def of(cls, run: Run, **policy: object) -> "Clock":
        await run.create(**policy)
        await run.command("DEL", index_key(run.run_id, "test_now"))
        await run.command("HSET", index_key(run.run_id, "run"), "now", round(time.time() * 1_000))
        return cls(run)

    async def jump(self, by_ms: int) -> None:
        """The host's clock jumps. Its distance from the run's is all that scripts know of it."""
        await self._run.command("HINCRBY", index_key(self._run.run_id, "run"), "lag", -by_ms)

    async def now(self) -> int:
        return int(await self._run.command("HGET", index_key(self._run.run_id, "run"), "now"))


async def test_a_jump_of_the_hosts_clock_moves_a_runs_by_one_step(run: Run) -> None:
    clock = await Clock.of(run)
    for by_ms in (600_000, HOUR_MS, -HOUR_MS, -600_000):
        await run.store.sweep()
        before = await clock.now()
        await clock.jump(by_ms)
        await run.store.sweep()
        assert before <= await clock.now() <= before + STEP_MS
        # From there it goes on with the host's at once.
        stood = await clock.now()
        while await clock.now() == stood:
            await run.store.sweep()


async def test_a_jump_ends_no_lease_and_gives_no_blocked_push_up(run: Run) -> None:
    clock = await Clock.of(run, overflow_action=OverflowAction.BLOCK, lease_ttl_ms=30_000, max_attempts=1)
    await run.submit("leased")
    lease = await run.one_lease()
    await run.fill("x", "y")
    group = run.group("z")
    (blocked,) = await run.push(group)
    for by_ms in (600_000, HOUR_MS):
        await clock.jump(by_ms)
        await run.store.sweep()
    assert (await run.tasks())["leased"] == 1
    assert await run.members("waiting") == [blocked.payload_key]
    await run.batch(0)
    result = await run.store.retry_push(run.run_id, [(group.facts, blocked.payload_key)])
    assert [outcome.kind.value for outcome in result.outcomes] == ["queued"]
    assert await run.push_kinds(run.group(lease)) == ["queued"]
    await run.check()
