"""Interceptor of every RPC: the caller is let in, errors become status codes with details, the RPC is measured.

Errors of the tree keep their reason; anything else becomes INTERNAL with an id under which the log has the traceback.
Where the client has gone away there is nothing to answer. A caller that is refused is refused before its request is
read.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, assert_never

import grpc
import grpc.aio
import structlog

from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.messages import parsing
from buffer_service.rpc.tracing import ServiceTraces
from buffer_service.security.gate import CALLER, Gate, caller
from buffer_service.security.roles import REFLECTION, RULES, SCALER_PREFIX, RunAt
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
    """Lets in, parses, translates errors and measures. What is not of the contract (health, reflection, KEDA's scaler)
    is only parsed; a check of health is asked for no token, and the scaler lets in by itself.
    """

    def __init__(self, metrics: RpcMetrics, gate: Gate, shares: Shares, traces: ServiceTraces | None = None) -> None:
        self._metrics = metrics
        self._gate = gate
        self._shares = shares
        self._traces = traces
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        partial_rollout: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - None where nobody serves the method, which the stubs deny
        """The guarded handler of the method, built once per method; or one that refuses the caller."""
        method = handler_call_details.method
        of_contract = method.startswith(PREFIX)
        by_itself = method == HEALTH_CHECK or method.startswith(SCALER_PREFIX)
        if not of_contract and (by_itself or not self._gate.asks):
            return await self._guarded_handler(method, partial_rollout, handler_call_details)
        try:
            # Reflection, and watches of health, which are streams without end.
            rule = RULES.get(method) if of_contract else REFLECTION
            # This RPC's task runs the handler too, so that it finds its caller.
            entered = self._gate.enter(_authorization(handler_call_details.invocation_metadata), method, rule)
            self._shares.admit(entered.token_id)
            CALLER.set(entered)
        except (AccessRefused, NotReady) as refusal:
            return self._refusing(method, refusal)
        return await self._guarded_handler(method, partial_rollout, handler_call_details)

    async def _guarded_handler(
        self,
        method: str,
        partial_rollout: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        guarded = self._guarded.get(method)
        if guarded is None:
            handler: Handler | None = await partial_rollout(details)
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
            await _abort(context, self._told(name, refusal, context))

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _guard(self, method: str, handler: Handler) -> Handler:
        for behavior, make in (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        ):
            if behavior is not None:
                name = method.rpartition("/")[2]
                ours = method in RULES
                checked = _checked(behavior, RULES[method].run_at) if ours else behavior
                if handler.request_deserializer is not None:
                    checked = parsing(f"request of {name}", handler.request_deserializer, checked)
                guarded = self._behavior(name, checked) if ours else self._foreign(name, checked)
                return make(guarded, None, handler.response_serializer)
        raise TypeError(f"{method} has no behavior that the service uses")

    def _behavior(self, method: str, behavior: Behavior) -> Behavior:
        async def guarded(request: object, context: Context) -> object:
            started = time.perf_counter()
            traced = self._traces.call(method, context) if self._traces is not None else None
            code = "OK"
            with self._metrics.in_progress(method):
                try:
                    with self._shares.held(caller().token_id):
                        return await behavior(request, context)
                except asyncio.CancelledError:
                    code = "CANCELLED"
                    raise
                except Exception as error:  # noqa: BLE001 - _end logs what is not told
                    code = self._end(method, error, context)
                    if code == "CANCELLED":
                        raise asyncio.CancelledError from None
                    return None
                finally:
                    self._metrics.ended(method, code, time.perf_counter() - started)
                    if traced is not None:
                        traced.ended(code)

        return guarded

    def _foreign(self, method: str, behavior: Behavior) -> Behavior:
        """Wrap a method of a servicer that is not ours: it aborts by itself, and may be a generator."""

        async def guarded(request: object, context: Context) -> object:
            try:
                answered = behavior(request, context)
                if not isinstance(answered, AsyncIterable):
                    return await answered
                async for message in answered:
                    await context.write(message)
            except grpc.aio.AbortError:
                raise
            except NotImplementedError:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served")
            except Exception as error:
                if _client_gone(error):
                    raise asyncio.CancelledError from error
                await _abort(context, self._told(method, self._failure(method, error), context))
            return None

        return guarded

    def _end(self, method: str, error: Exception, context: Context) -> str:
        """Have the RPC end with the error; returns its code.

        It does so neither by `abort` nor in the frame of the RPC. An error that is kept where it was raised makes a
        cycle of all that the RPC holds, its messages too.
        """
        cause = _cause(error)
        if _client_gone(cause):
            return "CANCELLED"
        failure = self._failure(method, cause)
        code, details, metadata = status_of(failure)
        context.set_code(code)
        context.set_details(details)
        context.set_trailing_metadata(metadata)
        return failure.code

    def _told(self, method: str, error: RolloutBufferError, context: Context) -> RolloutBufferError:
        """The error that the caller is told: less, where its address keeps failing."""
        if isinstance(error, Unauthenticated) and not self._gate.failed(_host(context.peer()), method, error):
            return Unauthenticated("too many calls from this address were refused")
        return error

    def _failure(self, method: str, error: Exception) -> RolloutBufferError:
        if isinstance(error, AccessRefused):
            self._metrics.refused(error.reason)
        if isinstance(error, RolloutBufferError):
            return error
        error_id = secrets.token_hex(6)
        log.error("internal error", error_id=error_id, method=method, exc_info=error)
        return RolloutBufferError(
            f"{method} failed inside the service; its log has the cause under error id {error_id}", error_id=error_id
        )


def _cause(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _client_gone(error: Exception) -> bool:
    """True for what gRPC raises when a call is over before its handler, or its server."""
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, (grpc.aio.AbortError, grpc.aio.UsageError))


async def _abort(context: Context, error: RolloutBufferError) -> None:
    try:
        await context.abort(*status_of(error))
    except grpc.aio.BaseError as ended:
        if _client_gone(ended):
            raise asyncio.CancelledError from ended
        raise


def _checked(behavior: Behavior, run_at: RunAt) -> Behavior:
    """The behavior after a look at the request's run."""
    match run_at:
        case RunAt.REF | RunAt.FIELD:
            run_of = attrgetter(run_at.value)
        case RunAt.BYTES | RunAt.NOWHERE:
            return behavior
        case _:
            assert_never(run_at)

    def checked(request: Any, context: Context) -> Any:  # noqa: ANN401 - of any method
        caller().check_run(run_of(request))
        return behavior(request, context)

    return checked


def _authorization(metadata: Sequence[tuple[str, str | bytes]] | None) -> str | None:
    for key, value in metadata or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return None


def _host(peer: str) -> str:
    """The address of a peer without its port: ipv4:1.2.3.4, ipv6:[::1], unix."""
    return peer.rpartition(":")[0] or peer
