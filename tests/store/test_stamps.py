"""Versions that groups say they were made by, and that nobody has published."""

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from tests.store.driver import Run, weights

PUBLISHED = "the version that is published, or one that a plan announces"


async def pushed(run: Run, name: str, head: ops.WeightVersion, tail: ops.WeightVersion) -> ops.Pushed:
    """The answer to a group of these versions, of which no plan is made."""
    return (await run.store.push(run.run_id, [run.group(name, head=head, tail=tail)])).outcomes[0]


@pytest.mark.parametrize(
    ("tail", "refused"),
    [
        pytest.param(weights(3), None, id="published"),
        pytest.param(weights(4), ("samples.spans.version", "4", f"at most 3, {PUBLISHED}"), id="to come"),
        pytest.param(weights(1000), ("samples.spans.version", "1000", f"at most 3, {PUBLISHED}"), id="far"),
        pytest.param(
            weights(0, 2), ("samples.spans.version.term", "2", "at most 1, the term of the run"), id="next term"
        ),
    ],
)
async def test_a_group_of_weights_that_nobody_published_is_refused(
    run: Run, tail: ops.WeightVersion, refused: tuple[str, str, str] | None
) -> None:
    await run.create(max_staleness=1)
    await run.publish(3)
    answer = await pushed(run, "a", weights(3), tail)
    if refused is None:
        assert answer.kind is ops.PushKind.QUEUED
    else:
        assert answer.kind is ops.PushKind.INVALID
        assert (answer.field, answer.value, answer.limit) == refused
        # The task goes on: what is made by published weights is taken.
        assert (await pushed(run, "a", weights(3), weights(3))).kind is ops.PushKind.QUEUED
    await run.check()


async def test_an_announced_version_may_be_used_before_it_is_published(run: Run) -> None:
    await run.create()
    await run.store.call(commands.plan_collective(run.run_id, ops.PlanCollective(1, 5, b"plan")))
    assert (await pushed(run, "a", weights(0), weights(5))).kind is ops.PushKind.QUEUED
    assert (await pushed(run, "b", weights(0), weights(6))).kind is ops.PushKind.INVALID
    await run.publish(5)
    assert (await pushed(run, "b", weights(0), weights(5))).kind is ops.PushKind.QUEUED
    assert (await pushed(run, "c", weights(0), weights(6))).kind is ops.PushKind.INVALID


async def test_versions_of_an_abandoned_timeline_are_taken_as_the_fork(run: Run) -> None:
    """Whatever they say: published or not, they are gone."""
    await run.create()
    await run.publish(3)
    await run.store.call(commands.plan_collective(run.run_id, ops.PlanCollective(1, 9, b"plan")))
    await run.resume()
    assert (await pushed(run, "a", weights(2), weights(9))).kind is ops.PushKind.QUEUED
    assert (await pushed(run, "b", weights(3, 2), weights(4, 2))).kind is ops.PushKind.INVALID
    await run.check()
