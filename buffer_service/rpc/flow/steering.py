"""Steering of runs towards their targets of staleness: one decision after each publish."""

import structlog

from buffer_service import commands
from buffer_service.control.decision import decide
from buffer_service.domain.ports import RunStore
from buffer_wire.errors import RolloutBufferError

log = structlog.get_logger(__name__)


async def steer(store: RunStore, run_id: str) -> None:
    """Decide for the run after its publish, if it has a target.

    A decision that fails fails no publish: the next one decides. Where a replica dies in between, the trainer repeats
    its publish at another one, which decides then. Of several the store keeps one.
    """
    try:
        situation = await store.call(commands.situation(run_id))
        if situation is not None:
            await store.call(commands.decide(run_id, decide(situation)))
    except RolloutBufferError as error:
        log.warning("nothing was decided after a publish", run=run_id, why=error.message)
