"""Blobs of a run, as images of prompts: kept once by their SHA-256, and read by whoever is told it.

A message is read, and a blob fetched, only when there is room for it, as pushes and pulls take it.
"""

from dataclasses import dataclass
from hashlib import sha256

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.room import Expected, Incoming, RawContext, Room
from buffer_service.rpc.messages import parsed
from buffer_service.security.gate import caller
from buffer_wire import limits
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import payloads_pb2 as pb

_COPIES = 2
"""Copies of a blob on its way: as it came or was fetched, and in the command's arguments or in the reply."""


@dataclass(frozen=True, slots=True)
class Blobs:
    """Calls of one process that write and read blobs."""

    store: RunStore
    incoming: Incoming
    outgoing: Room
    drain: Drain
    metrics: RpcMetrics

    async def write(self, context: RawContext) -> ops.WrittenBlob:
        """Keep the blob of one call. Raises InvalidField, UnknownRun, BlobsFull, NotReady; and as the store does."""
        async with self.drain.interruptible():
            message, share = await self.incoming.read(context, Expected(_COPIES * limits.MAX_BLOB_BYTES, 1))
        with share:
            if message is None:
                raise InvalidField("message", "none", "a serialized WriteBlobRequest")
            share.resize(_COPIES * len(message))
            self.metrics.received("WriteBlob", len(message))
            request = parsed("WriteBlobRequest", pb.WriteBlobRequest.FromString, message)
            del message
            caller().check_run(request.run.run_id)
            run_id, seen = fields.run_ref(request.run)
            fields.number(len(request.data), "data", 1, limits.MAX_BLOB_BYTES)
            if (digest := sha256(request.data).hexdigest()) != request.sha256:
                raise InvalidField("sha256", request.sha256[:64], f"{digest}, that of data")
            return await self.store.call(commands.write_blob(run_id, digest, request.data, seen_revision=seen))

    async def read(self, request: pb.ReadBlobRequest) -> bytes:
        """The serialized reply with a blob. Raises InvalidField, UnknownRun, UnknownBlob."""
        run_id = fields.run_id(request.run.run_id)
        if not limits.SHA256.fullmatch(request.sha256):
            raise InvalidField("sha256", request.sha256[:64], "64 digits of lower-case hex")
        with await self.outgoing.take(_COPIES * limits.MAX_BLOB_BYTES):
            data = await self.store.call(commands.read_blob(run_id, request.sha256))
            reply = pb.ReadBlobResponse(data=data).SerializeToString()
            self.metrics.sent("ReadBlob", len(reply))
            return reply
