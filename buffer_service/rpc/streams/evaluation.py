"""Results of an evaluation as a stream: what has ended, then what ends, until all has or the wait is over.

Every message says how far the evaluation is, and there is at least one.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

from buffer_service import commands
from buffer_service.domain import evaluations as ev
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.convert import evaluations as convert
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.stored_groups import undamaged
from rollout_buffer.v1 import evaluations_pb2 as pb

PORTION_RESULTS = 16
"""Number of results that are read at once."""
MESSAGE_BYTES = 1 << 20


async def results(
    store: RunStore, lines: WaitingLines, run_id: str, eval_id: str, *, seen: int, wait_s: float
) -> AsyncGenerator[pb.ReadEvaluationResponse]:
    """Messages of a read, from the result after the first `seen`. Raises UnknownEvaluation, NotReady on drain."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        ticket = lines.ticket(run_id, Topic.RESULTS)
        found = await store.call(commands.evaluation_results(run_id, eval_id, seen, PORTION_RESULTS))
        if found.results:
            seen += len(found.results)
            for message in _messages(found, await _bodies(store, run_id, found.results)):
                yield message
            continue
        if found.evaluation.done or loop.time() >= deadline:
            yield _message(found)
            return
        await lines.hint(run_id, Topic.RESULTS, ticket, deadline)


async def _bodies(store: RunStore, run_id: str, ended: Sequence[ev.EvaluationResult]) -> Iterator[pb.EvaluationResult]:
    keys = [result.payload_key for result in ended if result.payload_key]
    bodies = map(undamaged, keys, await store.fetch(run_id, keys))
    return (convert.to_result(result, next(bodies) if result.payload_key else None) for result in ended)


def _messages(found: ev.EvaluationResults, ended: Iterator[pb.EvaluationResult]) -> Iterator[pb.ReadEvaluationResponse]:
    """Messages of at most MESSAGE_BYTES, unless a single result is larger."""
    message, size = _message(found), 0
    for result in ended:
        result_bytes = result.ByteSize()
        if size and size + result_bytes > MESSAGE_BYTES:
            yield message
            message, size = _message(found), 0
        message.results.append(result)
        size += result_bytes
    yield message


def _message(found: ev.EvaluationResults) -> pb.ReadEvaluationResponse:
    return fields.reply(pb.ReadEvaluationResponse, found, results=[])
