"""Starts per minute of environments: how many leases are given when, over all who ask, and who goes past whom."""

import itertools
from collections import Counter

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, RunPolicy
from tests.store.driver import Run

MINUTE_MS = 60_000


async def begin(run: Run, *rules: EnvironmentRule, tasks: int = 20, **environments: int) -> None:
    """A run with these rules and, by environment, so many tasks."""
    await run.create(batch_groups=1_000, environments=rules)
    for environment, number in (environments or {"code": tasks}).items():
        await run.submit(*(f"{environment}{i}" for i in range(number)), environment=environment)


async def change(run: Run, *rules: EnvironmentRule) -> None:
    policy = RunPolicy(batch_groups=1_000, environments=rules)
    await run.store.call(commands.update_policy(run.run_id, policy))


def begun(leased: ops.Leased) -> Counter[str]:
    return Counter(grant.task_id.rstrip("0123456789") for grant in leased.grants)


async def test_tasks_of_a_limited_environment_begin_one_by_one_and_who_waits_is_told_for_how_long(run: Run) -> None:
    await begin(run, EnvironmentRule("code", starts_per_minute=60))
    first = await run.lease(8)
    assert (begun(first), first.wait) == ({"code": 1}, ops.LeaseWait.RATE_LIMITED)
    assert (first.limited_environment, first.limited_for_ms) == ("code", 1_000)
    await run.pass_ms(999)
    told = await run.lease(8, worker="other")
    assert (told.grants, told.limited_for_ms) == ([], 1)
    await run.pass_ms(1)
    assert begun(await run.lease(8, worker="other")) == {"code": 1}
    await run.check()


async def test_after_a_pause_a_burst_begins_at_once_and_no_more(run: Run) -> None:
    await begin(run, EnvironmentRule("code", starts_per_minute=30, start_burst=5))
    assert begun(await run.lease(8)) == {"code": 5}
    await run.pass_ms(4_000)
    assert begun(await run.lease(8)) == {"code": 2}
    await run.pass_ms(10 * MINUTE_MS)
    assert begun(await run.lease(8)) == {"code": 5}


@pytest.mark.parametrize(("rate", "burst"), [(7, 1), (45, 3), (1_000, 10)])
async def test_no_window_has_more_starts_than_the_rule_says(run: Run, rate: int, burst: int) -> None:
    await begin(run, EnvironmentRule("code", starts_per_minute=rate, start_burst=burst), tasks=200)
    times: list[int] = []
    now = 0
    for step in itertools.cycle((13, 170, 1, 2_900, 41, 700)):
        leased = await run.lease(64, worker=f"w{step % 3}")
        times += [now] * len(leased.grants)
        if now > 2 * MINUTE_MS or len(times) == 200:
            break
        await run.pass_ms(step)
        now += step
    for i, j in itertools.combinations(range(len(times)), 2):
        assert j - i + 1 <= burst + (times[j] - times[i]) * rate / MINUTE_MS
    assert len(times) >= min(200, now / (MINUTE_MS / rate + 2_900)), "what is allowed begins"


async def test_others_go_past_a_limited_environment(run: Run) -> None:
    rule = EnvironmentRule("code", priority=9, starts_per_minute=1)
    await begin(run, rule, code=5, math=5)
    leased = await run.lease(4)
    assert (begun(leased), leased.wait) == ({"code": 1, "math": 3}, None)


@pytest.mark.parametrize("shares", [(3, 1), (1, 0)])
async def test_what_a_limited_environment_may_not_use_of_its_share_goes_to_others(
    run: Run, shares: tuple[int, int]
) -> None:
    code, math = shares
    rules = EnvironmentRule("code", code, starts_per_minute=60, start_burst=2), EnvironmentRule("math", math)
    await begin(run, *rules, code=9, math=9)
    assert begun(await run.lease(8)) == {"code": 2, "math": 6}
    await run.pass_ms(2_000)
    # It has no claim to what it could not use.
    assert begun(await run.lease(4)) == {"code": 2, "math": 2}


async def test_a_lease_that_comes_back_begins_anew_and_a_change_of_the_limit_acts_at_once(run: Run) -> None:
    await begin(run, EnvironmentRule("code", starts_per_minute=60))
    (grant,) = (await run.lease(1)).grants
    await run.give_back(grant)
    assert (await run.lease(1)).wait is ops.LeaseWait.RATE_LIMITED
    view = await run.view()
    assert [(one.environment, one.starts, one.limited_for_ms) for one in view.environment_work] == [("code", 1, 1_000)]
    await change(run, EnvironmentRule("code", starts_per_minute=600))
    assert (await run.lease(1)).limited_for_ms == 100
    await change(run)
    assert begun(await run.lease(8)) == {"code": 8}


async def test_failures_are_counted_by_environment(run: Run) -> None:
    await begin(run, code=1, math=1)
    for _ in range(5):
        leased = await run.lease(2)
        for grant in leased.grants:
            kind = ops.ReturnKind.FAILED if grant.task_id == "code0" else ops.ReturnKind.INTERRUPTED
            await run.give_back(grant, kind=kind, error="the sandbox is down")
        await run.pass_ms(60_000)
    counts = {one.environment: one for one in (await run.view()).environment_work}
    assert (counts["code"].failed_attempts, counts["code"].failed_tasks) == (5, 1)
    assert (counts["math"].failed_attempts, counts["math"].failed_tasks) == (0, 0)
    await run.check()
