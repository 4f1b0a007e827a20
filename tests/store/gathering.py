"""Pulls that end in the middle of gathering a micro-batch."""

from typing import Any

from buffer_service.commands.replies import pack
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.policy import EnvironmentRule
from buffer_wire.revision import NO_REVISION
from tests.store.driver import Run

UNSET = -1
SHARES = tuple(EnvironmentRule(environment=f"env-{i}", share=share) for i, share in enumerate((3, 1, 0)))


async def portion(
    run: Run,
    groups: int,
    *,
    step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    train_version: int = UNSET,
    micro_batch: int = 0,
    batch_groups: int = UNSET,
    again: bool = False,
) -> str:
    """One call of a pull's script, of a process that dies after it."""
    request = (
        NO_REVISION,
        run.term,
        step,
        rank,
        world_size,
        train_version,
        micro_batch,
        batch_groups,
        groups,
        int(again),
    )
    return await run.store.call(Command(run.run_id, "pull", pack(*request), lambda tag, _: tag))


async def gather(run: Run, portions: int, groups: int = 2, **kwargs: Any) -> None:
    for index in range(portions):
        assert await portion(run, groups, again=index > 0, **kwargs) == "more"


async def fill(run: Run, count: int, first: int = 0, **kwargs: Any) -> None:
    """Groups g<i> of i % 7 + 1 tokens, in turn of three environments."""
    for i in range(first, first + count):
        await run.fill(f"g{i}", environment=f"env-{i % 3}", tokens=i % 7 + 1, **kwargs)


def ids(batch: ops.Batch) -> list[str]:
    return [group.group_id.removesuffix("/0") for group in batch.shard]
