"""A lease reply carries what one message can: the rest goes to the next request."""

from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule
from tests.store.driver import Run, weights


def ids(leased: ops.Leased) -> list[str]:
    return [grant.task_id for grant in leased.grants]


async def handed_back(run: Run, *sizes: int) -> None:
    """One task for each size, which came back with a partial rollout of so many bytes; specs have six."""
    names = [f"{number}" for number in range(len(sizes))]
    await run.submit(*names)
    for lease, size in zip((await run.lease(len(sizes))).grants, sizes, strict=True):
        await run.give_back(lease, partial_rollout=b"c" * size, head=weights(0), tokens=5)


async def test_leases_that_do_not_fit_into_half_a_message_come_with_the_next_request(run: Run) -> None:
    await run.create(batch_groups=4)
    await handed_back(run, 40, 43, 44, 1)
    first = await run.lease(4, message_bytes=200)
    assert (ids(first), first.wait) == (["0", "1"], None)
    second = await run.lease(4, message_bytes=200)
    assert (ids(second), second.wait) == (["2", "3"], ops.LeaseWait.NO_TASKS)
    assert [len(grant.partial_rollout) for grant in (*first.grants, *second.grants)] == [40, 43, 44, 1]


async def test_specs_count_too(run: Run) -> None:
    await run.create(batch_groups=4)
    await run.submit("a", "b", "c")
    assert ids(await run.lease(3, message_bytes=24)) == ["a", "b"]
    assert ids(await run.lease(3, message_bytes=24)) == ["c"]


async def test_a_repeat_gets_the_same_leases_and_no_more(run: Run) -> None:
    await run.create(batch_groups=4)
    await handed_back(run, 60, 60)
    first = await run.lease(2, request_id="lost", message_bytes=200)
    again = await run.lease(2, request_id="lost", message_bytes=200)
    assert again.grants == first.grants
    assert ids(again) == ["0"]


async def test_a_new_process_gets_what_its_predecessor_held_in_portions(run: Run) -> None:
    await run.create(batch_groups=4)
    await handed_back(run, 60, 60)
    await run.lease(1, instance="before", message_bytes=200)
    await run.lease(1, instance="before", message_bytes=200)
    assert ids(await run.lease(2, instance="after", message_bytes=200)) == ["0"]
    assert ids(await run.lease(2, instance="after", message_bytes=200)) == ["1"]


async def test_a_lease_larger_than_half_a_message_comes_alone(run: Run) -> None:
    await run.create(batch_groups=4)
    await handed_back(run, 1, 190, 1)
    leased = [await run.lease(3, message_bytes=200) for _ in range(3)]
    assert [ids(one) for one in leased] == [["0"], ["1"], ["2"]]
    assert len(leased[1].grants[0].partial_rollout) == 190


async def test_a_partial_rollout_that_fits_into_no_message_is_given_up(run: Run) -> None:
    await run.create(batch_groups=4)
    await handed_back(run, 1, 195)
    await run.lease(2, message_bytes=200)
    assert (await run.view()).statistics["partial_rollout_tokens_discarded"] == 0
    (grant,) = (await run.lease(2, message_bytes=200)).grants
    assert (grant.task_id, grant.partial_rollout) == ("1", b"")
    assert (await run.view()).statistics["partial_rollout_tokens_discarded"] == 5


async def test_an_environment_whose_task_did_not_fit_keeps_its_turn(run: Run) -> None:
    rules = tuple(EnvironmentRule(environment=name, share=1) for name in ("a", "b"))
    await run.create(batch_groups=4, environments=rules)
    for environment in ("a", "b"):
        await run.submit(*(f"{environment}{number}" for number in range(2)), environment=environment)
    # A spec has seven bytes.
    assert ids(await run.lease(4, message_bytes=14)) == ["a0"]
    assert [ids(await run.lease(4, message_bytes=14)) for _ in range(3)] == [["b0"], ["a1"], ["b1"]]
