"""Counter of groups without a lease: counted, in the reply to a reader of the run, and a metric."""

from buffer_service.admin.metrics.runs import RunCollector
from buffer_service.rpc.convert import runs
from tests.oracle.behaviour.world import World
from tests.store.driver import Run

NAME = "groups_without_lease"


async def test_the_store_counts_groups_without_a_lease_and_readers_see_it(run: Run) -> None:
    await run.create(max_queued_groups=9)
    await run.submit("leased")
    await run.push(run.group(await run.one_lease()))
    await run.push(run.group("a"), run.group("b"))
    view = await run.view()
    assert view.statistics[NAME] == 2
    assert getattr(runs.to_run(view).statistics, NAME) == 2
    samples = [sample for family in RunCollector([view]).collect() for sample in family.samples]
    assert [sample.value for sample in samples if sample.name == f"rollout_buffer_{NAME}_total"] == [2]
    await run.check()


def test_the_model_counts_them_too() -> None:
    world = World(batch_groups=1)
    world.push("a")
    assert world.statistic(NAME) == 1
