"""A transparent gRPC proxy between the candidate and the service: bytes in, bytes out, every method, all recorded.

Every call is carried as a stream in both directions, which on the wire is what a unary call is too. Metadata,
deadlines, status and trailing metadata pass through; the token is the kit's own. While the service is `away`
every call ends with UNAVAILABLE. Streams can be ended in order, as the service ends those that are old.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self

import grpc

from buffer_conformance.faults import Broken, Faults
from buffer_conformance.record import Exchange, Record
from buffer_wire.connection.access import Access
from buffer_wire.connection.channel import server_options
from buffer_wire.connection.channels import Connector
from buffer_wire.status import DETAIL_KEY
from rollout_buffer.v1 import common_pb2

_NOT_CARRIED = ("grpc-", ":", "user-agent", "te", "content-type", "authorization")
_FIRST_REQUEST_S = 1.0
_WRITE_S = 5.0
"""Longest wait for a reply that is being written when its call is to end: gRPC takes no status meanwhile."""
AWAY = "the service was away"
IN_ORDER = "the stream was ended in order"


class _InOrder(Exception):
    """The stream ends here with OK, as the service ends one at its age."""


class _Gone(Exception):
    """The candidate does not listen any more."""


class Proxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic when it runs
    """Use it in an `async with`; `address` is for the candidate."""

    def __init__(self, service: str, record: Record) -> None:
        self.record = record
        self.faults = Faults()
        self.address = ""
        self._service = service
        self._away = asyncio.Event()
        self._ends: dict[int, tuple[str, asyncio.Event]] = {}
        """Methods of the open calls by their numbers, with the events at which they end in order."""

    async def __aenter__(self) -> Self:
        self._channel = Connector(self._service, Access()).asyncio()
        self._server = grpc.aio.server(options=server_options())
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.faults.release()
        await self._server.stop(0.2)
        await self._channel.close(None)

    def service(self, details: Any) -> Any:  # noqa: ANN401 - untyped by gRPC
        """The handler of any method."""
        return grpc.stream_stream_rpc_method_handler(partial(self._handle, details.method))

    async def away(self, for_s: float) -> None:
        """Be away: end every call, refuse new ones, and come back."""
        self.record.mark("away", for_s=for_s)
        self._away.set()
        try:
            await asyncio.sleep(for_s)
        finally:
            self._away.clear()
            self.record.mark("back")

    def end_streams(self, *methods: str) -> None:
        """End the open streams of these methods in order."""
        for method, end in self._ends.values():
            if method in methods:
                end.set()

    async def _handle(self, path: str, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401
        exchange = self.record.open(path)
        status, details = grpc.StatusCode.OK, ""
        trailing: tuple[Any, ...] = ()
        try:
            if self._away.is_set():
                await self._refuse(exchange, requests)
            await self._carry(path, exchange, requests, context)
        except _InOrder:
            exchange.fault = IN_ORDER
        except Broken as broken:
            exchange.fault = str(broken)
            status, details = grpc.StatusCode.UNAVAILABLE, "connection lost"
        except grpc.aio.AioRpcError as error:
            status, details = error.code(), error.details() or ""
            trailing = tuple(error.trailing_metadata() or ())
            exchange.error = _detail(trailing)
        except (asyncio.CancelledError, _Gone):
            self._end(exchange, "CANCELLED")
            raise
        self._end(exchange, status.name)
        if status is not grpc.StatusCode.OK:
            await context.abort(status, details, trailing)

    def _end(self, exchange: Exchange, status: str) -> None:
        exchange.status, exchange.ended_s = status, self.record.now_s()

    async def _refuse(self, exchange: Exchange, requests: AsyncIterator[bytes]) -> None:
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_FIRST_REQUEST_S):
                self.record.entry(exchange, await anext(aiter(requests)), request=True)
        raise Broken(AWAY)

    async def _carry(
        self,
        path: str,
        exchange: Exchange,
        requests: AsyncIterator[bytes],
        context: Any,  # noqa: ANN401
    ) -> None:
        metadata = [
            (key, value) for key, value in context.invocation_metadata() or () if not key.startswith(_NOT_CARRIED)
        ]
        rpc: Any = self._channel.stream_stream(path, None, None)
        call = rpc(timeout=context.time_remaining(), metadata=metadata)
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        in_order = asyncio.Event()
        self._ends[exchange.number] = exchange.method, in_order
        writing: set[asyncio.Future[None]] = set()
        down = asyncio.create_task(self._down(exchange, call, context.write, writing))
        tasks = {
            down,
            asyncio.create_task(self._read(exchange, requests, arrived)),
            asyncio.create_task(self._up(exchange, arrived, call)),
            asyncio.create_task(self._cut()),
            asyncio.create_task(_until(in_order)),
        }
        waiting = tasks
        try:
            while not down.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            del self._ends[exchange.number]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
            if writing:
                await asyncio.wait(writing, timeout=_WRITE_S)

    async def _cut(self) -> None:
        await self._away.wait()
        raise Broken(AWAY)

    async def _read(self, exchange: Exchange, requests: AsyncIterator[bytes], arrived: "asyncio.Queue[Any]") -> None:
        """Requests are noted when they come, however long they are held back afterwards."""
        async for raw in requests:
            arrived.put_nowait(self.record.entry(exchange, raw, request=True))
        arrived.put_nowait(None)

    async def _up(self, exchange: Exchange, arrived: "asyncio.Queue[Any]", call: Any) -> None:  # noqa: ANN401
        # What fails here is told by the replies' side, with its status.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (entry := await arrived.get()) is not None:
                await self.faults.request(exchange, entry)
                await call.write(entry.raw)
            await call.done_writing()

    async def _down(
        self,
        exchange: Exchange,
        call: Any,  # noqa: ANN401
        write: Callable[[bytes], Any],
        writing: set[asyncio.Future[None]],
    ) -> None:
        async for raw in call:
            entry = self.record.entry(exchange, raw, request=False)
            self.faults.reply(exchange, entry)
            entry.delivered = True
            written: asyncio.Future[None] = asyncio.ensure_future(write(raw))
            writing.add(written)
            written.add_done_callback(partial(_forget, writing))
            try:
                await asyncio.shield(written)
            except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
                raise _Gone from error


async def _until(in_order: asyncio.Event) -> None:
    await in_order.wait()
    raise _InOrder


def _forget(writing: set[asyncio.Future[None]], written: asyncio.Future[None]) -> None:
    writing.discard(written)
    if not written.cancelled():
        written.exception()  # Of a call that has ended, nobody else asks.


def _detail(trailing: tuple[Any, ...]) -> common_pb2.ErrorDetail | None:
    for key, value in trailing:
        if key == DETAIL_KEY:
            return common_pb2.ErrorDetail.FromString(value)
    return None
