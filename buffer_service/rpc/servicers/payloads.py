"""The RPCs of access to the store, for payloads that clients write and read themselves."""

from dataclasses import dataclass
from typing import Any

import grpc.aio

from buffer_service import commands
from buffer_service.domain.ports import RunStore
from buffer_service.rpc.convert import fields
from rollout_buffer.v1 import payloads_pb2 as pb
from rollout_buffer.v1 import payloads_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_CLIENT_CHARS = 128
MAX_TROUBLE_CHARS = 512


@dataclass(frozen=True, slots=True)
class PayloadServicer(payloads_pb2_grpc.PayloadServiceServicer):
    """Servicer that lets clients in at the store."""

    store: RunStore

    async def GetWriteAccess(self, request: pb.PayloadAccessRequest, _: Context) -> pb.PayloadAccess:
        """Access with which new payloads can be written."""
        return await self._access(request)

    async def GetReadAccess(self, request: pb.PayloadAccessRequest, _: Context) -> pb.PayloadAccess:
        """Access with which payloads can be read."""
        return await self._access(request)

    async def _access(self, request: pb.PayloadAccessRequest) -> pb.PayloadAccess:
        run_id, _ = fields.run_ref(request.run)
        fields.line(request.client_id, "client_id", 1, MAX_CLIENT_CHARS)
        fields.text(request.trouble, "trouble", 0, MAX_TROUBLE_CHARS)
        await self.store.call(commands.view(run_id))
        return pb.PayloadAccess(relayed_because="this service lets no client in at its store")
