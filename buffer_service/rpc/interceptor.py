"""What every RPC goes through: the caller is let in, errors become status codes with details, the RPC is measured.

Errors of the tree keep their reason; anything else becomes INTERNAL with an id under which the log has the traceback.
A caller that is refused is refused before its request is read.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog

from buffer_service.observability.metrics import RpcMetrics
from buffer_service.security.gate import CALLER, Gate, caller
from buffer_service.security.roles import REFLECTION, RULES, RunAt
from buffer_service.security.shares import Shares
from buffer_wire.errors import AccessRefused, NotReady, RolloutBufferError, Unauthenticated
from buffer_wire.status import status_of

log = structlog.get_logger(__name__)

PREFIX = "/rollout_buffer.v1."
REFLECTION_PREFIX = "/grpc.reflection."
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

Context = grpc.aio.ServicerContext[Any, Any]
Behavior: TypeAlias = Callable[[Any, Any], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Lets in, translates errors and measures. A check of health passes untouched."""

    def __init__(self, metrics: RpcMetrics, gate: Gate, shares: Shares) -> None:
        self._metrics = metrics
        self._gate = gate
        self._shares = shares
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - None where nobody serves the method, which the stubs deny
        """The guarded handler of the method, built once per method; or one that refuses the caller."""
        method = handler_call_details.method
        of_contract = method.startswith(PREFIX)
        if not of_contract and (method == HEALTH_CHECK or not self._gate.asks):
            return await continuation(handler_call_details)
        try:
            # Reflection, and watches of health, which are streams without end.
            rule = RULES.get(method) if of_contract else REFLECTION
            # This RPC's task runs the handler too, so that it finds its caller.
            entered = self._gate.enter(_authorization(handler_call_details.invocation_metadata), method, rule)
            self._shares.admit(entered.token_id)
            CALLER.set(entered)
        except (AccessRefused, NotReady) as refusal:
            return self._refusing(method, refusal)
        if not of_contract:
            return await continuation(handler_call_details)
        guarded = self._guarded.get(method)
        if guarded is None:
            handler: Handler | None = await continuation(handler_call_details)
            if handler is None:
                return None
            guarded = self._guarded[method] = self._guard(method, handler)
        return guarded

    def _refusing(self, method: str, refusal: AccessRefused | NotReady) -> Handler:
        """A handler that reads nothing, whatever the client sends."""
        if method in RULES:
            name = method.rpartition("/")[2]
        else:
            name = "reflection" if method.startswith(REFLECTION_PREFIX) else "unknown"

        async def refuse(_: object, context: Context) -> None:
            if isinstance(refusal, AccessRefused):
                self._metrics.refused(refusal.reason)
            self._metrics.ended(name, refusal.code, 0.0)
            told: RolloutBufferError = refusal
            if isinstance(refusal, Unauthenticated) and not self._gate.failed(_host(context.peer()), name, refusal):
                told = Unauthenticated("too many calls from this address were refused")
            await context.abort(*status_of(told))

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _guard(self, method: str, handler: Handler) -> Handler:
        codecs = (handler.request_deserializer, handler.response_serializer)
        for behavior, make in (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        ):
            if behavior is not None:
                checked = _checked(behavior, RULES[method].run_at) if method in RULES else behavior
                return make(self._behavior(method.rpartition("/")[2], checked), *codecs)
        raise TypeError(f"{method} has no behavior that the contract uses")

    def _behavior(self, method: str, behavior: Behavior) -> Behavior:
        async def guarded(request: object, context: Context) -> object:
            started = time.perf_counter()
            code = "OK"
            with self._metrics.in_progress(method):
                try:
                    with self._shares.held(caller().token_id):
                        return await behavior(request, context)
                except asyncio.CancelledError:
                    code = "CANCELLED"
                    raise
                except Exception as error:
                    failure = self._failure(method, error)
                    code = failure.code
                    await context.abort(*status_of(failure))
                    raise AssertionError from error  # abort raises
                finally:
                    self._metrics.ended(method, code, time.perf_counter() - started)

        return guarded

    def _failure(self, method: str, error: Exception) -> RolloutBufferError:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, AccessRefused):
            self._metrics.refused(error.reason)
        if isinstance(error, RolloutBufferError):
            return error
        error_id = secrets.token_hex(6)
        log.error("internal error", error_id=error_id, method=method, exc_info=error)
        return RolloutBufferError(
            f"{method} failed inside the service; its log has the cause under error id {error_id}", error_id=error_id
        )


def _checked(behavior: Behavior, run_at: RunAt) -> Behavior:
    """The behavior after a look at the request's run."""
    if run_at is RunAt.REF:

        def by_reference(request: Any, context: Context) -> Any:  # noqa: ANN401 - of any method
            caller().check_run(request.run.run_id)
            return behavior(request, context)

        return by_reference
    if run_at is RunAt.FIELD:

        def by_field(request: Any, context: Context) -> Any:  # noqa: ANN401 - of any method
            caller().check_run(request.run_id)
            return behavior(request, context)

        return by_field
    return behavior


def _authorization(metadata: Sequence[tuple[str, str | bytes]] | None) -> str | None:
    for key, value in metadata or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return None


def _host(peer: str) -> str:
    """The address of a peer without its port: ipv4:1.2.3.4, ipv6:[::1], unix."""
    return peer.rpartition(":")[0] or peer
