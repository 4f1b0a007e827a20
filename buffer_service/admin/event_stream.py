"""A run as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Events:

- `run` with the whole run when it changed, at once and then at most one a second;
- `fault` while the store fails;
- `end` as the last one, with the reason.

Comments in between say that the stream lives. A browser that comes back with the id of the last event it got is not
told that event again.

Invariant: nothing is sent after the token that the request came with was revoked or has expired; looked at once a
CHECK_S.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from buffer_service.admin.feeds import Feed, Feeds, Told
from buffer_service.security.gate import Caller
from buffer_wire.errors import AccessRefused

RETRY_MS = 2_000
"""Wait, in milliseconds, before a browser connects again."""
HEARTBEAT_S = 5.0
"""Silence after which a comment is sent."""
CHECK_S = 1.0
SEND_S = 20.0
"""A browser that takes nothing for this long is let go."""


class EventStream:
    """The answer to one request, an ASGI application. Raises UnknownRun, StoreFault, NotReady before it begins."""

    def __init__(self, feeds: Feeds, run_id: str, caller: Caller, last_event_id: str = "") -> None:
        self._feeds = feeds
        self._run_id = run_id
        self._caller = caller
        self._last_event_id = last_event_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the browser goes away."""

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        async with self._feeds.watch(self._run_id, self._caller.token_id) as feed:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            answer = StreamingResponse(self._messages(feed), media_type="text/event-stream", headers=headers)
            with contextlib.suppress(TimeoutError):
                await answer(scope, receive, bounded)

    async def _messages(self, feed: Feed) -> AsyncIterator[str]:
        yield f"retry: {RETRY_MS}\n\n"
        clock = asyncio.get_running_loop().time
        sent, spoken = None, clock()
        try:
            while sent is None or sent.event != "end":
                self._caller.check_live()
                told = feed.told
                if told is not None and told is not sent:
                    if sent is not None or told.event_id != self._last_event_id:
                        yield _message(told)
                        spoken = clock()
                    sent = told
                elif clock() - spoken >= HEARTBEAT_S:
                    yield ": nothing changed\n\n"
                    spoken = clock()
                await feed.wait(sent, CHECK_S)
        except AccessRefused as refusal:
            yield _message(Told("", "end", json.dumps({"reason": refusal.reason, "message": refusal.message})))


def _message(told: Told) -> str:
    named = f"id: {told.event_id}\n" if told.event_id else ""
    return f"{named}event: {told.event}\ndata: {told.data}\n\n"
