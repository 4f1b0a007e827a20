"""The kit's own calls to the service, past the proxy."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import grpc

from buffer_conformance.methods import METHODS
from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from buffer_wire.connection.retry import Retry, rpc_error
from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import Revision
from buffer_wire.revisions import Revisions

ATTEMPT_S = 20.0
TRYING_S = 60.0
FIRST_S = 10.0


class Direct:
    """Calls by the short names of methods; use it in an `async with`. The run reference is filled in."""

    def __init__(self, service: str, run_id: str) -> None:
        self.run_id = run_id
        self._revisions = Revisions()
        self._channel = Connector(service, Access()).asyncio()

    async def __aenter__(self) -> Self:
        """Raises RolloutBufferError when there is no service."""
        try:
            await self.call("ListRuns", trying_s=FIRST_S)
        except BaseException:
            await self._channel.close(None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def call(
        self,
        method: str,
        *,
        retry_on: Callable[[RolloutBufferError], bool] = lambda error: error.retryable,
        trying_s: float = TRYING_S,
        **fields: Any,  # noqa: ANN401 - fields of the request
    ) -> Any:  # noqa: ANN401 - the reply
        """Make a unary call, repeated while `retry_on` holds, and return the reply. Raises RolloutBufferError."""
        rpc = self._rpc(self._channel.unary_unary, method)

        async def attempt() -> Any:  # noqa: ANN401
            return await rpc(self._request(method, fields), timeout=ATTEMPT_S)

        mend = partial(self._revisions.met, self.run_id)
        reply = await Retry(deadline_s=trying_s, waiting_on="the service", retry_on=retry_on, mend=mend).asyncio(
            attempt
        )
        self._note(reply)
        return reply

    async def stream(self, method: str, *, timeout_s: float = ATTEMPT_S, **fields: Any) -> list[Any]:  # noqa: ANN401
        """Return all replies to one request. Raises RolloutBufferError."""
        rpc = self._rpc(self._channel.unary_stream, method)
        try:
            replies = [reply async for reply in rpc(self._request(method, fields), timeout=timeout_s)]
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from error
        for reply in replies:
            self._note(reply)
        return replies

    def _rpc(self, kind: Callable[..., Any], method: str) -> Any:  # noqa: ANN401
        known = METHODS[method]
        return kind(
            known.path,
            request_serializer=known.request.SerializeToString,
            response_deserializer=known.reply.FromString,
        )

    def _request(self, method: str, fields: dict[str, Any]) -> Any:  # noqa: ANN401
        request: Any = METHODS[method].request(**fields)
        if method == "CreateRun":
            request.run_id = self.run_id
        elif method != "ListRuns":
            request.run.CopyFrom(self._revisions.ref(self.run_id))
        return request

    def _note(self, reply: Any) -> None:  # noqa: ANN401
        # A view of a run, without a proof, acknowledges nothing.
        if hasattr(reply, "revision_proof"):
            self._revisions.note(self.run_id, Revision.of(reply))
