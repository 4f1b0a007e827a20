"""The door of the admin page: probes pass, everybody else shows a token when the service asks for tokens.

A browser shows it as the password of HTTP's Basic scheme, under any user name; programs send it as a bearer token.
"""

import base64

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from buffer_service.security.gate import CALLER, Anybody, Gate
from buffer_service.security.roles import METRICS, OPEN_PATHS, PAGE, Rule, RunAt
from buffer_wire.errors import AccessRefused, Unauthenticated

RUNS = "/api/runs/"
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
        path: str = scope["path"].removesuffix("\n")  # The router's $ matches before it too.
        try:
            if path in OPEN_PATHS:
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
        # Named so that a browser asks for it.
        asked = {"WWW-Authenticate": 'Basic realm="rollout-buffer: the password is a token", charset="UTF-8"'}
        return JSONResponse({"reason": told.reason, "message": told.message}, 401, asked)


def _authorization(scope: Scope) -> str | None:
    """The header, as a bearer token where it is a password."""
    found = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    if found is None:
        return None
    scheme, _, rest = found.decode("latin-1").partition(" ")
    if scheme.lower() != "basic":
        return f"{scheme} {rest}"
    try:
        _, _, password = base64.b64decode(rest, validate=True).decode("utf-8").partition(":")
    except ValueError:
        return f"{scheme} {rest}"
    return f"Bearer {password}"
