"""Filter by truncated samples: what it ends, how it is counted and stated."""

from dataclasses import replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.rpc.convert import policies
from tests.oracle.behaviour.world import World
from tests.oracle.rules.filters import why_filtered
from tests.store.driver import Run

FIELD: dict[str, Any] = {"filter_max_truncated_samples": 1}
STATISTIC = "filtered_truncated_samples"


async def test_groups_with_more_truncated_samples_are_filtered_by_store_and_model_alike(run: Run) -> None:
    await run.create(max_queued_groups=9, **FIELD)
    for truncated, kind in ((1, "queued"), (2, "filtered")):
        group = run.group(f"t{truncated}")
        group = ops.NewGroup(replace(group.facts, truncated_samples=truncated), group.body)
        assert await run.push_kinds(group) == [kind]
        why = why_filtered(RunPolicy(**FIELD), group.facts)
        assert (why == STATISTIC) is (kind == "filtered")
    assert (await run.view()).statistics[STATISTIC] == 1
    assert (await run.view()).statistics["recent_acceptance_ppm"] < 1_000_000
    await run.check()


def test_the_model_follows_the_share_of_groups_that_pass() -> None:
    world = World(batch_groups=1, **FIELD)
    world.push("a", truncated=2)
    assert (world.statistic(STATISTIC), world.groups("filtered")) == (1, 1)
    assert world.statistic("recent_acceptance_ppm") < 1_000_000


def test_it_is_part_of_every_policy_that_is_told() -> None:
    assert policies.to_policy(RunPolicy()).HasField("filter_max_truncated_samples")  # type: ignore[arg-type]
