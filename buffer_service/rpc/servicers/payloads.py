"""The RPCs of payloads: access to the store for clients that write and read them there, and parts for the others."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ops import Direction
from buffer_service.domain.ports import RunStore, UsersRefused
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.budget import StreamSlots
from buffer_service.rpc.flow.room import RawContext
from buffer_service.rpc.payload_addresses import Offer, offer
from buffer_service.rpc.streams.blobs import Blobs
from buffer_service.rpc.streams.parts import PartStreams
from buffer_service.rpc_settings import RpcSettings
from buffer_service.security.gate import caller
from rollout_buffer.v1 import payloads_pb2 as pb

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

MAX_CLIENT_CHARS = 128
MAX_TROUBLE_CHARS = 512

NAMED_USER_MS = 3_600_000
"""Time after which a client that has a user of the operator's asks again."""

RELAYED_MS = 30_000
"""Longest time after which a client without access asks again."""


@dataclass(frozen=True, slots=True)
class PayloadServicer:
    """Servicer that lets clients in at the store, and notes those that relay nevertheless.

    WritePayload is handed bytes, and ReadPayload hands them back, so that no part is parsed by protobuf.
    """

    store: RunStore
    settings: RpcSettings
    parts: PartStreams
    blobs: Blobs
    slots: StreamSlots

    async def GetWriteAccess(self, request: pb.PayloadAccessRequest, context: Context) -> pb.PayloadAccess:
        """Access with which new payloads can be written."""
        return await self._access(request, context, Direction.WRITE, self.settings.payload_writer)

    async def GetReadAccess(self, request: pb.PayloadAccessRequest, context: Context) -> pb.PayloadAccess:
        """Access with which payloads can be read."""
        return await self._access(request, context, Direction.READ, self.settings.payload_reader)

    async def WritePayload(self, _requests: AsyncIterator[bytes], context: RawContext) -> bytes:
        """Write a payload in parts for a client that cannot reach the store."""
        with self.slots.slot(caller().token_id):
            written = await self.parts.write(context)
        return pb.WritePayloadResponse(written_bytes=written).SerializeToString()

    async def ReadPayload(self, request: pb.ReadPayloadRequest, context: RawContext) -> None:
        """Send the parts of a payload to a client that cannot reach the store."""
        with self.slots.slot(caller().token_id):
            await self.parts.read(request, context)

    async def WriteBlob(self, _requests: AsyncIterator[bytes], context: RawContext) -> bytes:
        """Keep a blob, of a unary call that is read as a stream of one message: only when there is room for it."""
        with self.slots.slot(caller().token_id):
            written = await self.blobs.write(context)
        return fields.reply(pb.WriteBlobResponse, written).SerializeToString()

    async def ReadBlob(self, request: pb.ReadBlobRequest, _context: Context) -> bytes:
        """Read a blob."""
        with self.slots.slot(caller().token_id):
            return await self.blobs.read(request)

    async def _access(
        self, request: pb.PayloadAccessRequest, context: Context, direction: Direction, named: str
    ) -> pb.PayloadAccess:
        run_id, _ = fields.run_ref(request.run)
        client_id = fields.line(request.client_id, "client_id", 1, MAX_CLIENT_CHARS)
        trouble = " ".join(fields.text(request.trouble, "trouble", 0, MAX_TROUBLE_CHARS).split())
        if self.settings.direct_payloads is False:
            # Nobody relays against anybody's will.
            await self._note(run_id, direction, client_id, "")
            return self._relayed("the service was started with --no-direct-payloads")
        # A client of a cluster may have met a change of it before the service did.
        place = await self.store.payload_place(anew=bool(trouble))
        offered = offer(self.settings, place, context.peer(), knows_shards=request.knows_shards)
        # A trouble with what was offered before is no reason where nothing is offered now.
        why, user = offered.why or trouble, None
        noted = await self._note(run_id, direction, client_id, why)
        if not offered.why:
            try:
                user = _named(named) or await self.store.payload_user(run_id, direction, noted)
            except UsersRefused as refusal:
                why = f"{refusal}; name users with RB_PAYLOAD_WRITER and RB_PAYLOAD_READER"
                await self._note(run_id, direction, client_id, why)
        if why != noted.former:
            client = {"run": run_id, "client": client_id, "direction": direction.value}
            if why:
                log.warning("a client's payloads are relayed", **client, why=why)
            else:
                log.info("a client's payloads go directly again", **client)
        return self._granted(offered, user, place) if user else self._relayed(why)

    async def _note(self, run_id: str, direction: Direction, client_id: str, why: str) -> ops.NotedClient:
        return await self.store.call(commands.note_client(run_id, direction, client_id, why))

    def _granted(self, offered: Offer, user: ops.StoreUser, place: ops.StorePlace) -> pb.PayloadAccess:
        return pb.PayloadAccess(
            addresses=offered.addresses,
            shards=offered.shards,
            username=user.name,
            password=user.password,
            database=place.database,
            authorities_pem=offered.authorities_pem,
            direct_from_bytes=self.settings.direct_from_bytes,
            unpushed_ms=ops.UNPUSHED_MS,
            valid_ms=user.valid_ms,
            max_group_bytes=self.settings.most_group_bytes,
        )

    def _relayed(self, why: str) -> pb.PayloadAccess:
        return pb.PayloadAccess(
            relayed_because=why[:MAX_TROUBLE_CHARS],
            valid_ms=RELAYED_MS,
            max_group_bytes=self.settings.most_group_bytes,
        )


def _named(user: str) -> ops.StoreUser | None:
    """The user that the operator has named, if there is one."""
    name, _, password = user.partition(":")
    return ops.StoreUser(name, password, NAMED_USER_MS) if user else None
