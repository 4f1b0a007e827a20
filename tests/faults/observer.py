"""Somebody who looks at the run from outside, all the time, through either service."""

from collections.abc import Callable

from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from buffer_wire.connection.retry import Retry
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
    channel = Connector(target, Access().effective()).asyncio()

    async def read() -> list[runs_pb2.Record]:
        request = runs_pb2.ExportRecordsRequest(run=common_pb2.RunRef(run_id=run_id))
        stream = runs_pb2_grpc.RunServiceStub(channel).ExportRecords(request, timeout=TIMEOUT_S)
        return [record async for message in stream for record in message.records]

    try:
        async with history.call("observer", "recording") as op:
            records = await Retry(deadline_s=TIMEOUT_S, waiting_on=f"the service at {target}").asyncio(read)
            times = [getattr(record, str(record.WhichOneof("event"))).time_ms for record in records]
            op.reply = {"events": [_event(record) for record in records], "times_ms": times}
    finally:
        await channel.close(None)


def _event(record: runs_pb2.Record) -> list[object]:
    match record.WhichOneof("event"):
        case "accepted":
            own: list[object] = [record.accepted.group_id, record.accepted.state]
        case "moved":
            own = [record.moved.group_id, record.moved.state]
        case "micro_batch":
            step = record.micro_batch
            own = [step.step, step.micro_batch, list(step.group_ids)]
        case "submitted":
            own = [record.submitted.task_id]
        case "failed":
            own = [record.failed.group_id]
        case "rewarded":
            own = [record.rewarded.group_id]
        case _:
            own = [record.trained.committed_steps]
    return [record.WhichOneof("event"), *own]


async def last_looks(history: History, run_id: str, addresses: list[str]) -> None:
    """All services say the same of a run in which nothing happens any more; then its recording."""
    views = []
    for address in addresses:
        async with AsyncBufferClient(address, OPTIONS) as client:
            views.append(await look(history, client, run_id))
    assert all(view == views[0] for view in views)
    await recording(history, addresses[0], run_id)
