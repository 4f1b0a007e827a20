"""Payloads that this process has just written to the store, kept a little while for the pull that wants them.

In asynchronous training most groups are pulled soon after they were pushed. One that went through this process need
not be read back: that saves the store a send and the service a receive. The index on the store alone says which
payloads a batch has. A key is never used for another body, so nothing can go stale here. A payload that is not here
is read from the store.

Invariant: at most `limit_bytes` are held, counted as the messages that the bodies are views of: a body keeps its whole
message alive. The oldest message goes first, all its bodies at once. A body that was taken is no longer held.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from buffer_service.domain.ops import Buffer


@dataclass(slots=True)
class _Message:
    size_bytes: int
    keys: set[str] = field(default_factory=set)


class RecentPayloads:
    """Bodies by payload key; `limit_bytes` 0 keeps none."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._bodies: dict[str, tuple[Buffer, int]] = {}
        """Body, and the number of its message."""
        self._messages: dict[int, _Message] = {}
        """Messages by number, the oldest first."""
        self._numbered = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are kept alive."""
        return self._held_bytes

    def put(self, payloads: Iterable[tuple[str, Buffer]]) -> None:
        """Bodies that were written and indexed."""
        last: object = None
        number = 0
        for key, body in payloads:
            whole = body.obj if isinstance(body, memoryview) else body
            size = len(whole)  # type: ignore[arg-type]
            if size > self._limit_bytes:
                continue
            if whole is not last:
                last = whole
                self._numbered += 1
                number = self._numbered
                self._messages[number] = _Message(size)
                self._held_bytes += size
            self._messages[number].keys.add(key)
            self._bodies[key] = (body, number)
        while self._held_bytes > self._limit_bytes:
            self._let_go(next(iter(self._messages)))

    def take(self, keys: Sequence[str]) -> list[Buffer | None]:
        """The bodies that are held, None for the others; they are held no longer."""
        return [self._take(key) for key in keys]

    def _take(self, key: str) -> Buffer | None:
        body, number = self._bodies.pop(key, (None, 0))
        if body is None:
            return None
        message = self._messages[number]
        message.keys.discard(key)
        if not message.keys:
            self._let_go(number)
        return body

    def _let_go(self, number: int) -> None:
        message = self._messages.pop(number)
        self._held_bytes -= message.size_bytes
        for key in message.keys:
            del self._bodies[key]
