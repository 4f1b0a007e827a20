"""Fresh starts: an engine that is about to load what was just published gets no new task before it has."""

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from tests.store.driver import Run, weights

PERIOD_MS = 1_000
LOAD_MS = 40


async def say(run: Run, version: int, engine_id: str = "e") -> None:
    report = ops.EngineReport(engine_id, "w", "ready", weights(version), 0, 0, "", 0)
    await run.store.call(commands.report_engine(run.run_id, report))


async def begin(run: Run, load_ms: int = LOAD_MS, period_ms: int = PERIOD_MS, **policy: int) -> None:
    """A run whose engine took `load_ms` to load version 1, and where version 2 was published a period later."""
    await run.create(batch_groups=2, **policy)
    await run.submit(*(f"t{number}" for number in range(9)))
    await say(run, 0)
    await run.publish(1)
    await run.pass_ms(load_ms)
    await say(run, 1)
    await run.pass_ms(period_ms - load_ms)
    await run.publish(2)


async def ask(run: Run, version: int) -> ops.Leased:
    return await run.lease(1, engine="e", loaded=weights(version))


async def test_right_after_a_publish_an_engine_that_loads_quickly_gets_no_task_before_it_has_loaded(run: Run) -> None:
    await begin(run)
    told = await ask(run, 1)
    assert (told.grants, told.wait, told.required_version) == ([], ops.LeaseWait.ENGINE_STALE, 2)
    await run.pass_ms(LOAD_MS // 2)
    assert (await ask(run, 2)).grants


async def test_an_engine_whose_load_is_late_works_on(run: Run) -> None:
    await begin(run)
    await run.pass_ms(2 * LOAD_MS)
    assert not (await ask(run, 1)).grants
    await run.pass_ms(1)
    assert (await ask(run, 1)).grants


async def test_an_engine_that_has_never_loaded_is_not_held_back(run: Run) -> None:
    await begin(run)
    assert (await run.lease(1, engine="new", loaded=weights(1))).grants


@pytest.mark.parametrize(
    ("load_ms", "policy"),
    [(PERIOD_MS // 8 + 1, {}), (LOAD_MS, {"fresh_start_ms": LOAD_MS - 1}), (LOAD_MS, {"fresh_start_ms": 0})],
    ids=["longer than an eighth of a period", "longer than the policy allows", "turned off"],
)
async def test_a_load_that_would_cost_too_much_is_not_waited_for(
    run: Run, load_ms: int, policy: dict[str, int]
) -> None:
    await begin(run, load_ms, **policy)
    assert (await ask(run, 1)).grants


async def test_an_eighth_of_a_period_is_waited_for(run: Run) -> None:
    await begin(run, PERIOD_MS // 8)
    assert not (await ask(run, 1)).grants


async def load_slowly(run: Run, version: int) -> None:
    await run.pass_ms(PERIOD_MS // 2)
    await say(run, version)
    await run.pass_ms(PERIOD_MS // 2)
    await run.publish(version + 1)


async def test_one_slow_load_turns_nothing_off_and_two_do(run: Run) -> None:
    await begin(run)
    await load_slowly(run, 2)
    assert not (await ask(run, 2)).grants
    await load_slowly(run, 3)
    assert (await ask(run, 3)).grants


async def test_a_quick_load_after_slow_ones_turns_it_on_again(run: Run) -> None:
    await begin(run)
    for version in (2, 3):
        await load_slowly(run, version)
    await run.pass_ms(LOAD_MS)
    await say(run, 4)
    await run.pass_ms(PERIOD_MS - LOAD_MS)
    await run.publish(5)
    assert not (await ask(run, 4)).grants


async def test_after_a_change_of_the_policy_the_time_between_publishes_is_not_known_and_nobody_waits(run: Run) -> None:
    await begin(run)
    policy = (await run.view()).policy
    await run.store.call(commands.update_policy(run.run_id, policy))
    assert not (await ask(run, 1)).grants
    await run.store.call(
        commands.update_policy(run.run_id, type(policy)(batch_groups=3, max_queued_groups=3, fresh_start_ms=500))
    )
    assert (await ask(run, 1)).grants
