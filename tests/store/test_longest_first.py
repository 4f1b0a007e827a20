"""Tasks that are submitted together are leased longest first, where the policy says so."""

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from tests.store.driver import Run


async def submit(run: Run, **expected: int) -> ops.Submitted:
    """Tasks with the tokens that are expected of each; those whose name ends in p have priority."""
    cursor = (await run.view()).cursor
    tasks = [ops.NewTask(name, 4, int(name[-1] == "p"), "", b"", tokens) for name, tokens in expected.items()]
    request = ops.Submit(run.term, f"submit-{cursor}", cursor, cursor + len(tasks), b"", tasks)
    return await run.store.call(commands.submit(run.run_id, request))


async def leased(run: Run) -> list[str]:
    return [grant.task_id for grant in (await run.lease(9)).grants]


async def test_of_tasks_that_are_submitted_together_the_longest_are_leased_first_within_their_priority(
    run: Run,
) -> None:
    await run.create(longest_first=True)
    submitted = await submit(run, unknown=0, short=3, also=7, long=9, same=7, last_p=1)
    assert submitted.task_ids == ["unknown", "short", "also", "long", "same", "last_p"]
    await submit(run, later=100)
    assert await leased(run) == ["last_p", "long", "also", "same", "short", "unknown", "later"]


async def test_a_change_of_the_policy_acts_on_what_is_submitted_after_it(run: Run) -> None:
    await run.create()
    await submit(run, a=1, b=2)
    await run.store.call(commands.update_policy(run.run_id, RunPolicy(batch_groups=2, longest_first=True)))
    await submit(run, c=1, d=2)
    assert await leased(run) == ["a", "b", "d", "c"]
