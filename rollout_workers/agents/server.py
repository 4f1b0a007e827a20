"""Server of the agents' requests: each episode has a base URL and a token of its own, which end with it.

Invariants: without an episode's token nothing is said, not even whether the episode exists; clients are told not to
repeat what was refused; while a turn takes long, its stream is kept alive.
"""

import asyncio
import hmac
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from buffer_wire.connection.http_protocol import AnswersOnce
from buffer_wire.errors import InvalidRequest
from rollout_workers.agents import chat, messages
from rollout_workers.agents.answers import Answer
from rollout_workers.agents.asked import Asked, RequestRefused, must_be
from rollout_workers.counters import describe
from rollout_workers.errors import EpisodeFull

_log = structlog.get_logger()

MODEL = "policy"
"""Name of the model in the list of models; requests may give any."""
MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0
"""Time without an answer after which a stream begins, and between its signs of life."""
_NOT_SERVED = {"/v1/responses": "the Responses API", "/v1/completions": "completions without messages"}
"""Ways to ask for a turn that are refused by name, and fail the sample."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half a character as JSON escapes it: two together are one, one alone can be in no text that goes anywhere."""
_ENDED_S = 1
_BACKLOG = 1_024
_STREAM = "text/event-stream"
_NO_REPEAT = {"x-should-retry": "false"}
"""Header by which the clients of both APIs know that it makes no sense to send the request again."""


class Dialect(Protocol):
    """API in which requests and answers are written: the modules chat and messages."""

    KEEP_ALIVE: bytes

    def read(self, body: Mapping[str, Any]) -> Asked:
        """The request of a body. Raises RequestRefused."""
        ...

    def reply(self, answer: Answer, asked: Asked, episode_id: str) -> dict[str, Any]:
        """The answer as a whole."""
        ...

    def events(self, answer: Answer, asked: Asked, episode_id: str) -> Iterator[bytes]:
        """The answer as a stream."""
        ...

    def error(self, kind: str, code: str, message: str) -> dict[str, Any]:
        """An error as a body."""
        ...

    def error_event(self, kind: str, code: str, message: str) -> bytes:
        """An error in a stream that has begun."""
        ...


class Talk(Protocol):
    """Talk of an agent with the model: rollout.Conversations."""

    async def answer(self, asked: Asked, *, repeated: bool = False) -> Answer:
        """The answer to a request. Raises what is to be told instead."""
        ...

    def fail(self, why: Exception) -> Exception:
        """Note that no sample comes of it; returns the first reason."""
        ...

    async def close(self) -> None:
        """End the requests under way."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Place at which an episode is served."""

    episode_id: str
    token: str
    url: str
    """Base URL, to which Anthropic's clients append /v1/messages."""


class AgentServer:
    """Serves the conversations that are open. `listen`: host:port; `advertise`: the host that agents are told."""

    def __init__(self, listen: str, advertise: str = "") -> None:
        host, _, port = listen.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._advertise = advertise or self._host
        self._base = ""
        self._open: dict[str, tuple[Place, Talk]] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve until the block ends. Raises OSError if the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._port), family=family, backlog=_BACKLOG)
        shown = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        self._base = f"http://{shown}:{listener.getsockname()[1]}"
        _log.info("serving the model to agents", url=self._base)
        routes = [
            Route("/{episode}/v1/chat/completions", self._door(chat, self._generate), methods=["POST"]),
            Route("/{episode}/v1/messages", self._door(messages, self._generate), methods=["POST"]),
            Route("/{episode}/v1/models", self._door(chat, self._models), methods=["GET"]),
            *(Route(f"/{{episode}}{path}", self._door(chat, self._refuse), methods=["POST"]) for path in _NOT_SERVED),
            Route("/{path:path}", self._unknown, methods=["GET", "POST"]),
        ]
        server = _Server(
            uvicorn.Config(
                Starlette(routes=routes),
                http=AnswersOnce,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_ENDED_S,
            )
        )
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.ended.set()
            await running

    @asynccontextmanager
    async def at_work(self, conversation: Talk) -> AsyncIterator[Place]:
        """Take the requests of a conversation; at the end of the block its token is worth nothing any more."""
        episode_id, token = secrets.token_hex(8), secrets.token_urlsafe(24)
        place = Place(episode_id, token, f"{self._base}/{episode_id}")
        self._open[episode_id] = place, conversation
        try:
            yield place
        finally:
            del self._open[episode_id]
            await conversation.close()

    # ── requests ─────────────────────────────────────────────────────────────

    def _door(
        self, dialect: Dialect, handler: Callable[[Dialect, Request, Place, Talk], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Let in who brings the episode's token, as either API sends it."""

        async def at_the_door(request: Request) -> Response:
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            given = request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
            place, conversation = self._open.get(request.path_params["episode"], (None, None))
            told = place is not None and hmac.compare_digest(given.encode(), place.token.encode())
            if place is None or conversation is None or not told:
                return _refusal(dialect, 401, "authentication_error", "unknown", "no open episode has this URL and key")
            return await handler(dialect, request, place, conversation)

        return at_the_door

    async def _unknown(self, request: Request) -> Response:
        known = "/v1/chat/completions, /v1/messages and /v1/models of an episode's base URL"
        return _refusal(chat, 404, "not_found_error", "unknown", f"{request.url.path} is not served, {known} are")

    async def _refuse(self, dialect: Dialect, request: Request, place: Place, conversation: Talk) -> Response:
        path = request.url.path.removeprefix(f"/{place.episode_id}")
        why = f"not supported: {_NOT_SERVED[path]} ({path}); ask /v1/chat/completions or /v1/messages"
        return _refused(dialect, conversation.fail(RequestRefused("not_served", why)))

    async def _models(self, _: Dialect, __: Request, ___: Place, ____: Talk) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rollout-buffer"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _generate(self, dialect: Dialect, request: Request, place: Place, conversation: Talk) -> Response:
        try:
            asked = _asked(dialect, await _body(request))
        except RequestRefused as refused:
            return _refused(dialect, conversation.fail(refused))
        except ClientDisconnect:
            return Response(status_code=400)  # To nobody.
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        making = asyncio.ensure_future(conversation.answer(asked, repeated=again))
        await asyncio.wait([making], timeout=KEEP_ALIVE_S if asked.stream else None)
        if not making.done():
            stream = self._slowly(dialect, asked, place, making)
            return StreamingResponse(stream, media_type=_STREAM)
        if error := _failure(making):
            return _refused(dialect, error)
        if asked.stream:
            return Response(b"".join(dialect.events(making.result(), asked, place.episode_id)), media_type=_STREAM)
        return JSONResponse(dialect.reply(making.result(), asked, place.episode_id))

    @staticmethod
    async def _slowly(
        dialect: Dialect, asked: Asked, place: Place, making: "asyncio.Future[Answer]"
    ) -> AsyncIterator[bytes]:
        """A stream that begins before its answer is there."""
        while not making.done():
            yield dialect.KEEP_ALIVE
            await asyncio.wait([making], timeout=KEEP_ALIVE_S)
        if error := _failure(making):
            yield dialect.error_event(*_said(error)[1:])
            return
        for event in dialect.events(making.result(), asked, place.episode_id):
            yield event


class _Server(uvicorn.Server):
    """Server within the worker, which handles the signals itself and says when it is over."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until `ended`."""
        await self.ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestRefused("too_large", f"a request has at most {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


def _asked(dialect: Dialect, body: bytes) -> Asked:
    try:
        # Not of bytes: Python's reader lets halves of characters (lone surrogates) pass there, and other encodings.
        found = json.loads(body.decode())
        if _HALF.search(body):
            json.dumps(found, ensure_ascii=False).encode()
        return dialect.read(must_be(found, dict, "body"))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise RequestRefused("invalid", f"not a request of this API: {describe(error)}") from error


def _said(error: BaseException) -> tuple[int, str, str, str]:
    """Status, kind, code and message of what the agent is told."""
    if isinstance(error, RequestRefused):
        status = {"too_large": 413, "ended": 503, "not_served": 404}.get(error.code, 400)
        return status, "api_error" if status == 503 else "invalid_request_error", error.code, str(error)
    if isinstance(error, EpisodeFull):
        return 400, "invalid_request_error", "context_length_exceeded", f"maximum context length: {error}"
    if isinstance(error, InvalidRequest):
        return 400, "invalid_request_error", error.reason, error.message
    return 500, "api_error", getattr(error, "reason", "failed"), describe(error)


def _failure(made: "asyncio.Future[Answer]") -> BaseException | None:
    return RequestRefused("ended", "the episode has ended") if made.cancelled() else made.exception()


def _refused(dialect: Dialect, error: BaseException) -> Response:
    status, kind, code, message = _said(error)
    return _refusal(dialect, status, kind, code, message)


def _refusal(dialect: Dialect, status: int, kind: str, code: str, message: str) -> Response:
    return JSONResponse(dialect.error(kind, code, message), status_code=status, headers=_NO_REPEAT)
