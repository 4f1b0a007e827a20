"""The door of the admin page: probes and the page's own files pass, everybody else shows a token when the service asks
for tokens.

The page and programs send it as a bearer token. A browser that opens another address by itself is asked for it as the
password of HTTP's Basic scheme, under any user name.
"""

import base64

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from buffer_service.admin.headers import guarded
from buffer_service.security.gate import CALLER, Anybody, Gate
from buffer_service.security.roles import METRICS, OPEN_PATHS, PAGE, PAGE_FILES, Rule, RunAt
from buffer_wire.errors import AccessRefused, Unauthenticated

RUNS = "/api/runs/"
_BASIC = 'Basic realm="rollout-buffer: the password is a token", charset="UTF-8"'
_METRICS_RULE, _PAGE_RULE = Rule(METRICS, RunAt.NOWHERE), Rule(PAGE, RunAt.NOWHERE)


class Entrance:
    """An ASGI application around the page's. Paths below /api/runs/ID are checked against the caller's runs here."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return  # No websockets; the server has no other events.
        send = guarded(send)
        path: str = scope["path"].removesuffix("\n")  # The router's $ matches before it too.
        try:
            if path in OPEN_PATHS or path.startswith(PAGE_FILES):
                CALLER.set(Anybody())
            else:
                rule = _METRICS_RULE if path == "/metrics" else _PAGE_RULE
                caller = self._gate.enter(_authorization(scope), path, rule)
                if path.startswith(RUNS):
                    caller.check_run(path.removeprefix(RUNS).partition("/")[0])
                CALLER.set(caller)
        except AccessRefused as refusal:
            await self._refused(scope, refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope, refusal: AccessRefused) -> JSONResponse:
        if not isinstance(refusal, Unauthenticated):
            return JSONResponse({"reason": refusal.reason, "message": refusal.message}, 403)
        peer = (scope.get("client") or ("unknown", 0))[0]
        told: AccessRefused = refusal
        if not self._gate.failed(peer, "admin page", refusal):
            told = Unauthenticated("too many calls from this address were refused")
        # Named so that a browser asks for it; not in the middle of the page, which asks by itself.
        asked = {"WWW-Authenticate": _BASIC if b"text/html" in _header(scope, b"accept") else "Bearer"}
        return JSONResponse({"reason": told.reason, "message": told.message}, 401, asked)


def _header(scope: Scope, name: bytes) -> bytes:
    """The first header of that name, empty where there is none."""
    return next((bytes(value) for each, value in scope["headers"] if each == name), b"")


def _authorization(scope: Scope) -> str | None:
    """The header, as a bearer token where it is a password."""
    found = _header(scope, b"authorization")
    if not found:
        return None
    scheme, _, rest = found.decode("latin-1").partition(" ")
    if scheme.lower() != "basic":
        return f"{scheme} {rest}"
    try:
        _, _, password = base64.b64decode(rest, validate=True).decode("utf-8").partition(":")
    except ValueError:
        return f"{scheme} {rest}"
    return f"Bearer {password}"
