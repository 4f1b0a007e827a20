"""Messages as gRPC hands them over: bytes. The service parses them by itself: gRPC answers one that it cannot parse
with UNKNOWN, and writes a traceback for each.

A malformed message is refused like a field that breaks its bound. The log has a line now and then that says how many
there were: whoever sends such messages can send many.
"""

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeVar

import structlog
from google.protobuf.message import DecodeError, Message

from buffer_service.rpc import integers
from buffer_service.security.rate import RateLimit
from buffer_wire.codec import MalformedMessage
from buffer_wire.errors import InvalidField

log = structlog.get_logger(__name__)

BURST = 3
PER_S = 0.1
"""Lines of one kind of message: at once, and a second."""

T = TypeVar("T")


class _Log:
    def __init__(self) -> None:
        self._lines = RateLimit(PER_S, BURST)
        self._untold: Counter[str] = Counter()

    def malformed(self, what: str, size: int, why: str) -> None:
        self._untold[what] += 1
        if self._lines.allows(what):
            log.warning("malformed messages", message=what, count=self._untold.pop(what), last_bytes=size, last_why=why)


_log = _Log()


def parsed(what: str, parse: Callable[[bytes], T], message: bytes) -> T:
    """The message, which is to be a serialized `what`, with integers within their bounds. Raises InvalidField."""
    try:
        request = parse(message)
    except (MalformedMessage, DecodeError) as error:
        _log.malformed(what, len(message), str(error))
        raise InvalidField("message", f"{len(message)} bytes", f"a serialized {what} ({error})") from None
    if isinstance(request, Message):
        integers.check(request)
    return request


def parsing(what: str, parse: Callable[[bytes], Any], behavior: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The behavior of a method, for a request in bytes or a stream of them."""

    def of_bytes(request: bytes | AsyncIterable[bytes], context: object) -> Any:  # noqa: ANN401 - of any method
        if isinstance(request, bytes):
            return behavior(parsed(what, parse, request), context)
        return behavior(each(request), context)

    async def each(requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
        async for request in requests:
            yield parsed(what, parse, request)

    return of_bytes
