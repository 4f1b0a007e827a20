"""Somebody who looks at the run from outside, all the time, through either service."""

from collections.abc import Callable

import grpc

from buffer_wire.connection.channel import client_options
from rollout_buffer.v1 import common_pb2, runs_pb2, runs_pb2_grpc
from tests.faults.calls import OPTIONS
from tests.faults.history import History
from tests.faults.looks import look, pause
from tests.faults.trainer import Trainer
from trainer_client import AsyncBufferClient

TIMEOUT_S = 20.0


async def observe(trainer: Trainer, target: Callable[[], str]) -> None:
    """Look until cancelled, by a new connection every few looks."""
    history = trainer.history
    while True:
        async with AsyncBufferClient(target(), OPTIONS) as client:
            for _ in range(8):
                await pause(history)
                trainer.view = await look(history, client, trainer.run_id)
                history.tick()


async def recording(history: History, target: str, run_id: str) -> None:
    """Everything that the run itself remembers of its groups, recorded as one call."""
    channel = grpc.aio.insecure_channel(target, options=client_options())
    try:
        async with history.call("observer", "recording") as op:
            request = runs_pb2.ExportRecordsRequest(run=common_pb2.RunRef(run_id=run_id))
            stream = runs_pb2_grpc.RunServiceStub(channel).ExportRecords(request, timeout=TIMEOUT_S)
            op.reply = {"events": [_event(record) async for message in stream for record in message.records]}
    finally:
        await channel.close(None)


def _event(record: runs_pb2.Record) -> list[object]:
    kind = record.WhichOneof("event")
    if kind == "accepted":
        return [kind, record.accepted.group_id, record.accepted.state]
    if kind == "moved":
        return [kind, record.moved.group_id, record.moved.state]
    if kind == "micro_batch":
        return [kind, record.micro_batch.step, record.micro_batch.micro_batch, list(record.micro_batch.group_ids)]
    if kind == "submitted":
        return [kind, record.submitted.task_id]
    if kind == "failed":
        return [kind, record.failed.group_id]
    if kind == "rewarded":
        return [kind, record.rewarded.group_id]
    return [kind, record.trained.committed_steps]


async def last_looks(trainer: Trainer, addresses: list[str]) -> None:
    """Both services say the same of a run in which nothing happens any more; then its recording."""
    views = []
    for address in addresses:
        async with AsyncBufferClient(address, OPTIONS) as client:
            views.append(await look(trainer.history, client, trainer.run_id))
    assert views[0] == views[1]
    await recording(trainer.history, addresses[0], trainer.run_id)
