"""Turns that the model writes in a row, each by as many engine calls as it takes.

Interruptions of the engine (pauses, lost connections) are not seen outside. After the worker was told to stop, a turn
does not end.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from rollout_workers.engine.types import FinishReason
from rollout_workers.errors import EpisodeFull
from rollout_workers.generation.engine_calls import EMPTY_CALLS, EngineCalls
from rollout_workers.generation.samples import ROW_STRIDE
from rollout_workers.generation.sampling import request_of
from rollout_workers.generation.trajectory.rows import Rows


def room_of(calls: EngineCalls, index: int) -> int:
    """Tokens that still fit into a row, the environment's and the model's together."""
    progress = calls.progress
    return max(calls.slot.info.context_length - len(progress.prompt_of(index)) - len(progress.row(index)), 0)


async def write_turn(
    calls: EngineCalls,
    rows: Rows,
    index: int,
    deadline: float,
    most: int,
    fewest: int,
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
) -> FinishReason:
    """Generate until the turn of this row is complete, or has `most` tokens. `deadline` is on the monotonic clock.
    Raises EpisodeFull when not one token fits, and the error that ends the sample.
    """
    progress, sample, sample_index = calls.progress, calls.progress.row(index), index % ROW_STRIDE
    empty_calls = 0
    while True:
        if calls.ended:
            await _never()
        began = sample.noted
        left = _left(calls, index, most - (len(sample) - began))
        if left < 1:
            if len(sample) > began:
                return "length"
            raise EpisodeFull(sample_index, "max_new_tokens or the context are used up")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            rows.fail(calls.failure(f"sample {sample_index} was not finished in time"))
        before = len(sample)
        request = request_of(
            progress.task,
            index,
            np.concatenate([progress.prompt_of(index), sample.output_ids]),
            left,
            generated=sample.generated,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            min_new_tokens=fewest - (len(sample) - began),
        )
        failed = await calls.make([request], left_s)
        finish, sample.finish = sample.finish, None
        if finish is not None:
            return finish
        empty_calls = empty_calls + 1 if len(sample) == before else 0
        error = failed.get(index)
        if len(sample) < before and error is not None:
            # Its tokens were those of other weights: the function has to begin anew.
            rows.fail(error)
        if empty_calls == EMPTY_CALLS:
            error = calls.failure(f"{empty_calls} engine calls in a row were aborted without a token")
        if error is not None and not calls.ended:
            calls.say({sample_index: error})
            final = empty_calls == EMPTY_CALLS
            if not await calls.may_try_again(sample_index, error, final=final) and not calls.ended:
                rows.fail(error)


def _left(calls: EngineCalls, index: int, of_turn: int) -> int:
    """Tokens that the next engine call may bring."""
    progress, sample = calls.progress, calls.progress.row(index)
    if len(progress.prompt_of(index)) + len(sample) > calls.slot.info.max_input_tokens:
        return 0
    return min(of_turn, progress.task.sampling.max_new_tokens - sample.generated, room_of(calls, index))


async def _never() -> None:
    """Wait to be cancelled."""
    await asyncio.get_running_loop().create_future()
