"""Process 0 generates, every process gets the result and takes its slice, as verifiers' trainer does it.

An error of process 0 is sent as well and raised on every process, so that none waits for a broadcast that never comes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from buffer_wire.errors import InvalidField
from trainer_client.integrations.verifiers_generator import AsyncBatchGenerator
from trainer_client.integrations.verifiers_results import BatchResult

Broadcast: TypeAlias = Callable[[list[Any]], object]
"""Overwrites the list's entries by those of process 0, such as torch.distributed.broadcast_object_list (src 0) or
accelerate's `lambda box: broadcast_object_list(box, from_process=0)`."""


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """The whole result, for advantages and logs, and this process's rows [start, stop) of it."""

    result: BatchResult
    start: int
    stop: int


def get_batch_slice(
    generator: AsyncBatchGenerator | None,
    batch_id: int,
    *,
    rank: int,
    world_size: int,
    broadcast: Broadcast,
    timeout: float | None = None,
) -> BatchSlice:
    """`get_batch` on process 0, whose `generator` it is; the others pass None. Every process has to call it.

    Raises what `get_batch` raised, on every process, and InvalidField when the rows do not divide by `world_size`.
    """
    box: list[Any] = [None]
    if rank == 0:
        if generator is None:
            raise InvalidField("generator", None, "process 0's generator")
        try:
            box[0] = generator.get_batch(batch_id, timeout)
        except (RuntimeError, TimeoutError) as error:
            # As text: what caused it need not survive pickling.
            box[0] = type(error)(str(error))
    broadcast(box)
    outcome = box[0]
    if isinstance(outcome, Exception):
        raise outcome
    rows = len(outcome.processed_results.prompt_ids)
    if rows % world_size:
        raise InvalidField("world_size", world_size, f"a divisor of the batch's {rows} rows")
    share = rows // world_size
    return BatchSlice(outcome, rank * share, (rank + 1) * share)
