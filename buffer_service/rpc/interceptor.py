"""What every RPC of the contract goes through: errors become status codes with details, and the RPC is measured.

Errors of the tree keep their reason; anything else becomes INTERNAL with an id under which the log has the traceback.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog

from buffer_service.observability.metrics import RpcMetrics
from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import status_of

log = structlog.get_logger(__name__)

PREFIX = "/rollout_buffer.v1."

Context = grpc.aio.ServicerContext[Any, Any]
Behavior: TypeAlias = Callable[[Any, Any], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Translates errors and measures. Health and reflection pass untouched."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - None where nobody serves the method, which the stubs deny
        """The guarded handler of the method; built once per method."""
        method = handler_call_details.method
        if not method.startswith(PREFIX):
            return await continuation(handler_call_details)
        guarded = self._guarded.get(method)
        if guarded is None:
            handler: Handler | None = await continuation(handler_call_details)
            if handler is None:
                return None
            guarded = self._guarded[method] = self._guard(method.rpartition("/")[2], handler)
        return guarded

    def _guard(self, method: str, handler: Handler) -> Handler:
        codecs = (handler.request_deserializer, handler.response_serializer)
        for behavior, make in (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        ):
            if behavior is not None:
                return make(self._behavior(method, behavior), *codecs)
        raise TypeError(f"{method} has no behavior that the contract uses")

    def _behavior(self, method: str, behavior: Behavior) -> Behavior:
        async def guarded(request: object, context: Context) -> object:
            started = time.perf_counter()
            code = "OK"
            with self._metrics.in_progress(method):
                try:
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
        if isinstance(error, RolloutBufferError):
            return error
        error_id = secrets.token_hex(6)
        log.error("internal error", error_id=error_id, method=method, exc_info=error)
        return RolloutBufferError(
            f"{method} failed inside the service; its log has the cause under error id {error_id}", error_id=error_id
        )
