"""Errors on the wire: an ErrorDetail in the trailing metadata of the failed RPC, and back.

One table, derived from the error tree: the gRPC status code is each class's `code`. An error that carries no detail
(a proxy's, or gRPC's own) becomes a ServiceUnreachable, a refusal, or a plain RolloutBufferError, and keeps the status.
"""

from collections.abc import Iterable

import grpc

from buffer_wire.errors import PermissionDenied, RolloutBufferError, Unauthenticated, by_reason
from rollout_buffer.v1 import common_pb2

DETAIL_KEY = "rollout-buffer-error-bin"


class ServiceUnreachable(RolloutBufferError):
    """The service itself gave no answer: connection refused, reset, or the RPC's own deadline. Attributes: status."""

    reason = "service_unreachable"
    code = "UNAVAILABLE"
    retryable = True


_TRANSPORT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_REFUSALS: dict[grpc.StatusCode, type[RolloutBufferError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def to_detail(error: RolloutBufferError) -> common_pb2.ErrorDetail:
    """The error as a message."""
    return common_pb2.ErrorDetail(
        reason=error.reason, message=error.message, retryable=error.retryable, attributes=error.attributes
    )


def from_detail(detail: common_pb2.ErrorDetail) -> RolloutBufferError:
    """The error of a message; an unknown reason becomes a RolloutBufferError with the attribute `reason`."""
    cls = by_reason().get(detail.reason)
    attributes = dict(detail.attributes)
    if cls is None:
        return RolloutBufferError.from_wire(detail.message, {**attributes, "reason": detail.reason})
    return cls.from_wire(detail.message, attributes)


def status_of(error: RolloutBufferError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Status code, details and trailing metadata of the error."""
    return (
        grpc.StatusCode[error.code],
        error.message[:1024],
        ((DETAIL_KEY, to_detail(error).SerializeToString()),),
    )


def error_of(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]] | None
) -> RolloutBufferError:
    """The error that a failed RPC carries."""
    for key, value in trailing or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    message = f"{code.name}: {details or 'no details'}"
    if code in _TRANSPORT:
        return ServiceUnreachable(message, status=code.name)
    if code in _REFUSALS:
        return _REFUSALS[code].from_wire(message, {"status": code.name})
    return RolloutBufferError(message, status=code.name)
