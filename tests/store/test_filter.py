"""The filter: what it ends at acceptance, and what a run notices of it."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import text, unpack
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.rules.filters import NO_REWARD_BOUND
from buffer_service.store.keys import index_key
from tests.store.driver import Run

EQUAL, LENGTH, REWARD = "filtered_equal_rewards", "filtered_response_tokens", "filtered_mean_reward"


async def push_one(run: Run, name: str, **facts: Any) -> tuple[str, str]:
    """Return what became of a group, and which statistic of the filter rose."""
    before = (await run.view()).statistics
    (kind,) = await run.push_kinds(run.group(name, **facts))
    after = (await run.view()).statistics
    risen = [statistic for statistic in (EQUAL, LENGTH, REWARD) if after[statistic] > before[statistic]]
    return kind, " ".join(risen)


async def test_groups_whose_samples_all_have_one_reward_can_be_filtered(run: Run) -> None:
    await run.create(max_queued_groups=9, filter_equal_rewards=True)
    assert await push_one(run, "a", rewards=[0.5, 0.5]) == ("filtered", EQUAL)
    assert await push_one(run, "b", rewards=[0.5, 0.25]) == ("queued", "")
    assert await push_one(run, "c", rewards=[0.5]) == ("queued", "")
    assert await run.ledger() == {"accepted": 3, "queued": 2, "filtered": 1}
    await run.check()


async def test_groups_with_short_or_long_responses_can_be_filtered(run: Run) -> None:
    await run.create(max_queued_groups=9, filter_min_response_tokens=2, filter_max_response_tokens=5)
    assert await push_one(run, "short", lengths=[3, 1]) == ("filtered", LENGTH)
    assert await push_one(run, "long", lengths=[3, 6]) == ("filtered", LENGTH)
    assert await push_one(run, "right", lengths=[2, 5]) == ("queued", "")
    await run.check()


async def test_no_longest_response_is_no_bound(run: Run) -> None:
    await run.create(filter_min_response_tokens=2)
    assert await push_one(run, "long", lengths=[3, 1 << 30]) == ("queued", "")


async def test_groups_that_are_too_easy_or_too_hard_can_be_filtered(run: Run) -> None:
    await run.create(max_queued_groups=9, filter_min_mean_reward_milli=-500, filter_max_mean_reward_milli=750)
    assert await push_one(run, "hard", rewards=[-1, -0.25]) == ("filtered", REWARD)
    assert await push_one(run, "easy", rewards=[1, 0.75]) == ("filtered", REWARD)
    assert await push_one(run, "low", rewards=[-1, 0]) == ("queued", "")
    assert await push_one(run, "high", rewards=[1, 0.5]) == ("queued", "")
    await run.check()


async def test_the_first_filter_that_applies_counts(run: Run) -> None:
    await run.create(filter_equal_rewards=True, filter_min_response_tokens=2, filter_max_mean_reward_milli=500)
    assert await push_one(run, "a", rewards=[1, 1], lengths=[1]) == ("filtered", EQUAL)
    assert await push_one(run, "b", rewards=[1, 2], lengths=[1]) == ("filtered", LENGTH)
    assert await push_one(run, "c", rewards=[1, 2], lengths=[2]) == ("filtered", REWARD)


async def test_a_filtered_group_ends_its_task_and_leaves_no_payload(run: Run) -> None:
    await run.create(filter_equal_rewards=True)
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    await run.give_back(a, partial_rollout=b"half", head=ops.WeightVersion(1, 0), tokens=3)
    again = await run.one_lease()
    bad = run.group(again, rewards=[1, 1])
    assert await run.push_kinds(bad, bad, run.group(a)) == ["filtered", "duplicate", "closed"]
    assert await run.push_kinds(run.group(b)) == ["queued"]
    assert await run.tasks() == {"submitted": 2, "completed": 2}
    assert (await run.view()).groups["filtered"] == ops.Amount(1, 4, 10, 4)
    await run.check()
    assert len(await run.payload_keys()) == 1
    assert await run.members("ended") == ["a"]


async def test_a_filtered_group_needs_no_room_and_does_not_wait(run: Run) -> None:
    await run.create(filter_equal_rewards=True, overflow_action=OverflowAction.BLOCK)
    await run.fill("a", "b")
    kinds = await run.push_kinds(run.group("c"), run.group("d", rewards=[1, 1]), run.group("e"))
    assert kinds == ["blocked", "filtered", "blocked"]
    await run.batch(0)
    assert [g.sequence for g in (await run.batch(0)).shard] == [1, 2]
    assert (await run.view()).groups["filtered"].groups == 1


async def test_a_filter_may_catch_a_group_that_waited(run: Run) -> None:
    await run.create(overflow_action=OverflowAction.BLOCK)
    await run.fill("a", "b")
    group = run.group("c", rewards=[1, 1])
    (blocked,) = await run.push(group)
    await run.store.call(
        commands.update_policy(
            run.run_id, RunPolicy(batch_groups=2, overflow_action=OverflowAction.BLOCK, filter_equal_rewards=True)
        )
    )
    for _ in range(2):
        result = await run.store.retry_push(run.run_id, [(group.facts, blocked.payload_key)])
        assert [outcome.kind.value for outcome in result.outcomes] == ["filtered"]
    assert await run.members("waiting") == []
    assert await run.ledger() == {"accepted": 3, "queued": 2, "filtered": 1}
    await run.check()


async def test_recent_acceptance_follows_what_the_filter_lets_through(run: Run) -> None:
    await run.create(max_queued_groups=9, filter_equal_rewards=True)
    expected = 1_000_000
    for name, rewards in (("a", [1, 1]), ("b", [1, 0]), ("c", [1, 1]), ("d", [1, 1])):
        await run.push(run.group(name, rewards=rewards))
        expected = (expected * 63 + (1_000_000 if rewards == [1, 0] else 0)) // 64
        assert (await run.view()).statistics["recent_acceptance_ppm"] == expected
    assert expected == 954_089


@pytest.mark.parametrize(
    "policy",
    [
        RunPolicy(batch_groups=2, max_queued_groups=9),
        RunPolicy(
            batch_groups=2,
            max_queued_groups=9,
            filter_min_mean_reward_milli=-NO_REWARD_BOUND,
            filter_max_mean_reward_milli=NO_REWARD_BOUND,
        ),
    ],
)
async def test_without_a_filter_acceptance_is_not_followed(run: Run, policy: RunPolicy) -> None:
    await run.create(max_queued_groups=9, filter_equal_rewards=True)
    await run.push(run.group("a", rewards=[1, 1]))
    await run.store.call(commands.update_policy(run.run_id, policy))
    await run.fill("b", rewards=[1, 1])
    assert (await run.view()).statistics["recent_acceptance_ppm"] == 984_375


async def test_ledgers_by_environment_add_up(run: Run) -> None:
    await run.create(filter_equal_rewards=True)
    await run.fill("a", environment="math", tokens=7)
    await run.push(run.group("b", environment="code", rewards=[1, 1]))
    await run.fill("c", environment="code")
    await run.batch(0)
    environments = (await run.view()).environments
    assert set(environments) == {"math", "code"}
    assert environments["math"]["accepted"] == environments["math"]["delivered"] == ops.Amount(1, 4, 7, 6)
    code = {name: amount.groups for name, amount in environments["code"].items() if amount.groups}
    assert code == {"accepted": 2, "filtered": 1, "delivered": 1}
    await run.check()


async def recorded(run: Run) -> list[tuple[str, list[Any]]]:
    """Events of the run's recording."""
    events = await run.command("XRANGE", index_key(run.run_id, "record"), "-", "+")
    return [(text(fields[1]), unpack(fields[3])) for _, fields in events]


async def test_accepted_and_ended_groups_are_recorded_where_the_policy_asks_for_it(run: Run) -> None:
    await run.create(batch_groups=1, filter_equal_rewards=True, record_groups=True)
    await run.fill("a", environment="math", head=2, tail=4, rewards=[1, 0.5], lengths=[7, 8, 9])
    await run.push(run.group("b", rewards=[1, 1]))
    await run.fill("c")
    (kind, first), (_, second), moved, _ = await recorded(run)
    assert kind == "accepted"
    (key,) = {key for key in await run.payload_keys() if key == text(first[12])}
    facts = run.group("a", rewards=[1, 0.5], lengths=[7, 8, 9]).facts
    assert first == [
        run.now, b"a/0", 1, b"math", facts.response_lengths, facts.rewards, 10, 6, 2, 4, 3000, b"queued", key.encode(),
    ]  # fmt: skip
    assert (second[1], second[11]) == (b"b/0", b"filtered")
    assert moved == ("moved", [run.now, b"a/0", b"dropped_overflow"])


async def test_rewards_of_trajectories_are_recorded_where_samples_are_rows(run: Run) -> None:
    await run.create(record_groups=True)
    await run.fill("plain")
    layout = await run.command("HGET", index_key(run.run_id, "run"), "layout")
    rows = run.group("rows", rewards=[0, 1, 1])
    of_trajectories = struct.pack("<2f", 0.5, 1)
    await run.push(replace(rows, facts=replace(rows.facts, trajectory_rewards=of_trajectories)))
    plain, recorded_rows = [event for kind, event in await recorded(run) if kind == "accepted"]
    assert (len(plain), recorded_rows[13:]) == (13, [of_trajectories])
    # Services of 0.1.0 read events of 13 fields alone.
    assert await run.command("HGET", index_key(run.run_id, "run"), "layout") == layout + b"p"


async def test_tasks_are_recorded_with_their_metadata_and_when_they_fail(run: Run) -> None:
    await run.create(record_groups=True, max_attempts=1)
    tasks = [ops.NewTask("a", 2, 0, "", b"x", metadata=b'{"index":7}'), ops.NewTask("bare", 2, 0, "", b"x")]
    await run.store.call(commands.submit(run.run_id, ops.Submit(1, "first", 0, 2, b"", tasks)))
    assert await recorded(run) == [("submitted", [run.now, b"a", b'{"index":7}'])]
    lease = await run.one_lease()
    await run.give_back(lease, kind=ops.ReturnKind.FAILED, error="no such tool")
    assert (await recorded(run))[1:] == [("failed", [run.now, b"a/0", b"no such tool"])]


async def test_nothing_is_recorded_unasked(run: Run) -> None:
    await run.create(batch_groups=1)
    await run.fill("a", "b")
    assert await run.command("EXISTS", index_key(run.run_id, "record")) == 0
