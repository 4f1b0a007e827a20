"""Tests of the order in which queued groups enter batches and pending tasks are leased: orders, priorities, shares."""

import random

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, Order, RunPolicy, StaleAction, StalenessMeasure
from buffer_service.store.keys import index_key
from buffer_wire.errors import InvalidField
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.stride import Stride
from tests.store.driver import Run, weights

FIFO, LIFO, STALEST, PRIORITY = Order.FIFO, Order.LIFO, Order.STALEST_FIRST, Order.PRIORITY


def shares(**by_environment: int) -> tuple[EnvironmentRule, ...]:
    return tuple(EnvironmentRule(environment=name, share=share) for name, share in by_environment.items())


def priorities(**by_environment: int) -> tuple[EnvironmentRule, ...]:
    return tuple(EnvironmentRule(environment=name, priority=priority) for name, priority in by_environment.items())


async def assemble(run: Run, count: int, first: int = 0) -> list[str]:
    """Task ids of the groups that the next `count` steps of one group take."""
    batches = [await run.batch(step) for step in range(first, first + count)]
    return [group.group_id.removesuffix("/0") for batch in batches for group in batch.shard]


async def lease_one_by_one(run: Run, count: int) -> str:
    """Environments of the tasks leased one after another, named by their first letters."""
    return "".join([(await run.one_lease()).task_id[0] for _ in range(count)])


async def queue_with_priorities(run: Run, **priority_of: int) -> None:
    """Queue groups of tasks with these priorities, in this order; the environment is the name's first letter."""
    for name, priority in priority_of.items():
        await run.submit((name, priority), environment=name[0])
        await run.push(run.group(await run.one_lease(), environment=name[0]))


@pytest.mark.parametrize(("order", "expected"), [(FIFO, "abcd"), (LIFO, "dcba"), (STALEST, "bcad"), (PRIORITY, "abcd")])
async def test_groups_of_one_environment_enter_batches_in_the_policys_order(
    run: Run, order: Order, expected: str
) -> None:
    await run.create(batch_groups=1, max_queued_groups=9, order=order)
    for name, head in (("a", 5), ("b", 4), ("c", 4), ("d", 6)):
        await run.fill(name, head=head)
    assert "".join(await assemble(run, 4)) == expected
    await run.check()


@pytest.mark.parametrize(
    ("measure", "expected"),
    [(StalenessMeasure.HEAD, "abc"), (StalenessMeasure.TAIL, "cab"), (StalenessMeasure.MEAN, "bca")],
)
async def test_stalest_first_goes_by_the_policys_measure(run: Run, measure: StalenessMeasure, expected: str) -> None:
    await run.create(batch_groups=1, max_queued_groups=9, order=STALEST, staleness_measure=measure)
    await run.fill("c", head=3, tail=4, mean=3500)
    await run.fill("b", head=2, tail=9, mean=2100)
    await run.fill("a", head=1, tail=5, mean=4999)
    assert "".join(await assemble(run, 3)) == expected


async def test_groups_of_equal_priority_keep_their_order_and_a_rule_outranks_the_tasks(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=9, order=PRIORITY, environments=priorities(x=5))
    await queue_with_priorities(run, x_low=1, y_low=2, x_high=9, y_high=7, y_high_too=7)
    assert await assemble(run, 5) == ["y_high", "y_high_too", "x_high", "x_low", "y_low"]
    await run.check()


async def test_tasks_of_an_environment_with_a_priority_are_leased_by_it(run: Run) -> None:
    await run.create(environments=priorities(x=5))
    await run.submit(("x-low", 1), ("x-high", 9), environment="x")
    await run.submit(("y-low", 2), ("y-high", 7), ("y-same", 5), environment="y")
    leased = [(await run.one_lease()).task_id for _ in range(5)]
    assert leased == ["y-high", "x-high", "y-same", "x-low", "y-low"]
    await run.check()


async def test_shares_are_kept_exactly_when_batches_are_assembled(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=99, environments=shares(a=3, b=1))
    for index in range(12):
        await run.fill(f"a{index}", environment="a")
        await run.fill(f"b{index}", environment="b")
    taken = await assemble(run, 12)
    assert "".join(name[0] for name in taken) == "abaaabaaabaa"
    assert [name for name in taken if name[0] == "a"] == [f"a{index}" for index in range(9)]
    await run.check()


async def test_a_batch_is_shared_out_as_single_picks_are(run: Run) -> None:
    await run.create(batch_groups=8, max_queued_groups=99, environments=shares(a=3, b=1))
    for index in range(12):
        await run.fill(f"a{index}", environment="a")
        await run.fill(f"b{index}", environment="b")
    first, second = await run.batch(0), await run.batch(1)
    assert [sum(g.group_id[0] == "a" for g in batch.shard) for batch in (first, second)] == [6, 6]
    assert [sum(g.group_id[0] == "b" for g in batch.shard) for batch in (first, second)] == [2, 2]


async def test_shares_are_kept_exactly_when_tasks_are_leased(run: Run) -> None:
    await run.create(environments=shares(a=3, b=1))
    await run.submit(*[f"a{index}" for index in range(12)], environment="a")
    await run.submit(*[f"b{index}" for index in range(12)], environment="b")
    assert await lease_one_by_one(run, 8) == "abaaabaa"
    leased = await run.lease(4)
    assert "".join(grant.task_id[0] for grant in leased.grants) == "abaa"
    await run.check()


async def test_many_environments_take_their_turns_until_they_have_nothing_left(run: Run) -> None:
    rng = random.Random(0)
    names = [f"e{number:02}" for number in range(40)]
    rules = shares(**{name: rng.randrange(1, 9) for name in names})
    await run.create(batch_groups=30, max_queued_groups=999, environments=rules)
    left = {name: [f"{name}-{index}" for index in range(rng.randrange(1, 8))] for name in names}
    for name in names:
        await run.submit(*left[name], environment=name)
    mixture, stride = Mixture.of(RunPolicy(environments=rules)), Stride()
    tasks = [task for its in left.values() for task in its]
    expected = []
    while environment := mixture.turn([name for name in names if left[name]], stride):
        expected.append(left[environment].pop(0))
        stride.take(environment, mixture.share(environment))
    assert sorted(expected) == sorted(tasks)

    grants = [grant for count in (7, 60, len(tasks)) for grant in (await run.lease(count)).grants]
    assert [grant.task_id for grant in grants] == expected
    by_task = {grant.task_id: grant for grant in grants}
    await run.push(*(run.group(by_task[task], environment=task.split("-")[0]) for task in tasks))
    for step in range(len(tasks) // 30):
        taken = {group.group_id.removesuffix("/0") for group in (await run.batch(step)).shard}
        assert taken == set(expected[30 * step : 30 * step + 30])
    await run.check()


async def test_leasing_and_assembly_count_shares_apart(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=9, environments=shares(a=1, b=1))
    await run.submit("a1", environment="a")
    await run.submit("b1", environment="b")
    await run.fill("a2", environment="a")
    await run.fill("b2", environment="b")
    assert await assemble(run, 1) == ["a2"]
    assert await lease_one_by_one(run, 1) == "a"
    assert await assemble(run, 1, first=1) == ["b2"]


async def test_equal_passes_go_by_the_bytes_of_the_names(run: Run) -> None:
    await run.create(environments=(EnvironmentRule(environment="unused", share=1),))
    for name in ("a", "\N{LATIN SMALL LETTER E WITH ACUTE}", "Z", "ab"):
        await run.submit(f"{name}-1", f"{name}-2", environment=name)
    leased = [grant.task_id for grant in (await run.lease(8)).grants]
    names = ["Z", "a", "ab", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
    assert leased == [f"{name}-{turn}" for turn in (1, 2) for name in names]


async def test_an_environment_that_comes_late_does_not_make_up_for_its_absence(run: Run) -> None:
    await run.create(environments=shares(a=1, b=1))
    await run.submit(*[f"a{index}" for index in range(20)], environment="a")
    assert await lease_one_by_one(run, 6) == "aaaaaa"
    await run.submit(*[f"b{index}" for index in range(9)], environment="b")
    assert await lease_one_by_one(run, 6) == "bababa"


async def test_share_0_is_served_only_when_no_other_has_anything(run: Run) -> None:
    await run.create(environments=shares(a=1, spare=0, spent=0))
    await run.submit(("spare-1", 1), environment="spare")
    await run.submit(("spent-1", 9), environment="spent")
    await run.submit("a1", "a2", environment="a")
    await run.submit("b1", environment="b")
    leased = [grant.task_id for grant in (await run.lease(9)).grants]
    assert leased == ["a1", "b1", "a2", "spent-1", "spare-1"]


async def test_a_pick_that_the_token_budget_stops_does_not_count(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=9, batch_tokens=20, environments=shares(a=1, b=1))
    for index in range(2):
        await run.fill(f"a{index}", environment="a", tokens=10)
        await run.fill(f"b{index}", environment="b", tokens=15)
    assert [[g.group_id for g in (await run.batch(step)).shard] for step in range(3)] == [["a0/0"], ["b0/0"], ["a1/0"]]


async def test_order_and_shares_may_change_while_groups_are_queued(run: Run) -> None:
    def policy(order: Order = FIFO, environments: tuple[EnvironmentRule, ...] = ()) -> RunPolicy:
        return RunPolicy(batch_groups=1, max_queued_groups=20, order=order, environments=environments)

    await run.create(batch_groups=1, max_queued_groups=20)
    for index in range(6):
        await run.fill(f"a{index}", environment="a", head=6 - index)
    for index in range(6):
        await run.fill(f"b{index}", environment="b", head=6 - index)
    stride = ("HEXISTS", index_key(run.run_id, "run"), "queue_stride")
    assert await assemble(run, 2) == ["a0", "a1"]
    await run.store.call(commands.update_policy(run.run_id, policy(LIFO)))
    assert await assemble(run, 2, first=2) == ["b5", "b4"]
    await run.store.call(commands.update_policy(run.run_id, policy(STALEST, shares(a=1, b=1))))
    assert await assemble(run, 3, first=4) == ["a5", "b3", "a4"]
    assert await run.command(*stride) == 1
    await run.store.call(commands.update_policy(run.run_id, policy(FIFO)))
    assert await run.command(*stride) == 0
    assert await assemble(run, 1, first=7) == ["a2"]
    await run.check()


@pytest.mark.parametrize("order", list(Order))
async def test_many_subqueues_are_merged_in_order(run: Run, order: Order) -> None:
    rng = random.Random(order)
    count = 150
    await run.create(batch_groups=50, max_queued_groups=count, order=order, environments=priorities(e1=4))
    queued = []
    for index in range(count):
        environment, priority, head = f"e{rng.randrange(5)}", rng.randrange(3), rng.randrange(7)
        await run.submit((f"t{index}", priority), environment=environment)
        queued.append((index, environment, priority, head))
    grants = {grant.task_id: grant for grant in (await run.lease(count)).grants}
    await run.push(
        *(run.group(grants[f"t{index}"], environment=environment, head=head) for index, environment, _, head in queued)
    )

    def place(group: tuple[int, str, int, int]) -> tuple[int, ...]:
        index, environment, priority, head = group
        if order is LIFO:
            return (-index,)
        if order is STALEST:
            return (head, index)
        if order in {PRIORITY, Order.SUBMISSION}:  # Tasks are leased by priority.
            return (-(4 if environment == "e1" else priority), -priority, index)
        return (index,)

    expected = [f"t{index}/0" for index, *_ in sorted(queued, key=place)]
    for step in range(3):
        taken = {group.group_id for group in (await run.batch(step)).shard}
        assert taken == set(expected[50 * step : 50 * step + 50])
    await run.check()


async def test_overflow_drops_the_oldest_of_all_environments_whatever_the_order(run: Run) -> None:
    await run.create(max_queued_groups=3, order=PRIORITY, environments=shares(a=1))
    await queue_with_priorities(run, b1=9, a1=0, a2=3)
    await run.fill("c1", "c2", environment="c")
    assert await run.queue() == ["a2/0", "c1/0", "c2/0"]
    await run.check()


async def test_the_257th_environment_is_refused(run: Run) -> None:
    await run.create(batch_groups=1000)
    await run.submit(*[f"t{index}" for index in range(2)], environment="e0")
    outcomes = await run.push(*(run.group(f"g{index}", environment=f"e{index}") for index in range(1, 257)))
    assert [outcome.kind.value for outcome in outcomes] == ["queued"] * 255 + ["invalid"]
    refused = outcomes[-1]
    assert (refused.field, refused.value, refused.limit) == ("environment", "e256", "one of the run's 256 environments")
    kinds = await run.push_kinds(run.group("g1", environment="e256"), run.group("new", environment="e7"))
    assert kinds == ["duplicate", "queued"]
    before = await run.view()
    tasks = [ops.NewTask(name, 4, 0, environment, b"") for name, environment in (("x", "e9"), ("y", "e999"))]
    with pytest.raises(InvalidField) as refusal:
        await run.store.call(commands.submit(run.run_id, ops.Submit(1, "another", before.cursor, 9, b"", tasks)))
    assert refusal.value.attributes["field"] == "tasks[1].environment"
    after = await run.view()
    assert (after.tasks, after.revision, after.cursor) == (before.tasks, before.revision, before.cursor)
    await run.check()


async def test_a_run_takes_all_its_environments_in_one_submit_and_no_more(run: Run) -> None:
    await run.create()

    def request(count: int) -> ops.Submit:
        tasks = [ops.NewTask(f"t{index}", 4, 0, f"e{index // 2}", b"") for index in range(count)]
        return ops.Submit(1, f"submit-{count}", 0, 1, b"", tasks)

    with pytest.raises(InvalidField) as refusal:
        await run.store.call(commands.submit(run.run_id, request(514)))
    assert refusal.value.attributes["field"] == "tasks[512].environment"
    assert (await run.store.call(commands.submit(run.run_id, request(512)))).pending == 512
    assert await run.command("ZCARD", index_key(run.run_id, "environments")) == 256
    await run.check()


@pytest.mark.parametrize(
    ("measure", "fresh"),
    [(StalenessMeasure.HEAD, ["d"]), (StalenessMeasure.TAIL, ["b", "c", "d"]), (StalenessMeasure.MEAN, ["c", "d"])],
)
async def test_the_gate_goes_by_the_policys_measure(run: Run, measure: StalenessMeasure, fresh: list[str]) -> None:
    await run.create(batch_groups=4, max_queued_groups=9, max_staleness=1, staleness_measure=measure)
    await run.fill("a", head=1, tail=1)
    await run.fill("b", head=1, tail=2, mean=1999)
    await run.fill("c", head=1, tail=3, mean=2000)
    await run.fill("d", head=2, tail=2)
    assert isinstance(await run.pull(0, train_version=3), ops.Short)
    assert await run.queue() == [f"{name}/0" for name in fresh]
    await run.check()


async def test_means_and_tails_of_an_abandoned_timeline_count_as_its_fork(run: Run) -> None:
    await run.create(
        batch_groups=1, max_queued_groups=9, order=STALEST, staleness_measure=StalenessMeasure.MEAN, max_staleness=2
    )
    await run.publish(1)
    await run.fill("a", head=1)
    await run.batch(0)
    await run.publish(5, commit_through=0)
    await run.fill("late", head=4, tail=5, mean=4500)
    await run.fill("early", head=1, tail=1, mean=1000)
    await run.resume(0)
    # Made before the resume, pushed after it: the fork at version 1 bounds it, and the sequence breaks the tie.
    await run.fill("after", head=weights(3), tail=weights(5), mean=3700)
    await run.fill("new", head=weights(1, term=2), mean=1000)
    assert await assemble(run, 4, first=1) == ["late", "early", "after", "new"]
    await run.check()


async def test_recycling_ends_after_the_policys_incarnations(run: Run) -> None:
    await run.create(
        batch_groups=1, max_queued_groups=9, max_staleness=0, stale_action=StaleAction.RECYCLE, max_incarnations=2
    )
    await run.submit("a")
    await run.push(run.group(await run.one_lease()))
    assert isinstance(await run.pull(0, train_version=1), ops.Short)
    assert await run.ledger() == {"accepted": 1, "recycled": 1}
    await run.publish(1)
    again = await run.one_lease(loaded=weights(1))
    assert again.incarnation == 1
    await run.push(run.group(again, head=1))
    assert isinstance(await run.pull(0, train_version=2), ops.Short)
    assert await run.ledger() == {"accepted": 2, "recycled": 1, "dropped_stale": 1}
    assert await run.tasks() == {"submitted": 1, "completed": 1}
    await run.check()
