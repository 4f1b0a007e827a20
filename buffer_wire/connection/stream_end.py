"""End of a written grpc.aio stream: the server's status, not the one that a failed write puts over it.

In grpcio, 1.85 included, a write fails where the stream has just ended, and puts "INTERNAL: Internal error from Core"
over the status that the server gave (grpc/grpc#36066). Under steady writes nine ends in ten are such. The server's
status is there first, when the call's done callbacks run, and is kept from then.
"""

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import ServiceUnreachable, error_of

T = TypeVar("T")

_FAILED_WRITE = "Internal error from Core"


class StreamEnd:
    """The end of one call; made before the first write."""

    def __init__(self, call: "grpc.aio.Call") -> None:
        self._call = call
        self._status: tuple[grpc.StatusCode, str | None, Any] | None = None
        call.add_done_callback(self._keep)

    async def error(self) -> RolloutBufferError | None:
        """The error that the ended call carries, None when it ended in order.

        A write that failed before any status came is ServiceUnreachable.
        """
        call = self._call
        code, details, trailing = self._status or (
            await call.code(),
            await call.details(),
            await call.trailing_metadata(),
        )
        if code is grpc.StatusCode.OK:
            return None
        if code is grpc.StatusCode.INTERNAL and details == _FAILED_WRITE:
            return ServiceUnreachable("the stream ended while a message was sent", status=code.name)
        return error_of(code, details, trailing)

    def _keep(self, call: Any) -> None:  # noqa: ANN401 - grpc.aio gives the call, its types another thing
        self._status = (_at_once(call.code()), _at_once(call.details()), _at_once(call.trailing_metadata()))


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a call that is done has its status")
