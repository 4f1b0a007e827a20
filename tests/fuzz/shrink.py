"""The smallest message that still fails like one that was found to."""

import contextlib
from dataclasses import replace

import grpc

from tests.fuzz.messages import METHODS
from tests.fuzz.verdicts import NEVER, Failure

TRIES = 300
TIMEOUT_S = 2.0


def shrunk(channel: grpc.Channel, failure: Failure) -> Failure:
    """The failure with a smaller message, or as it is where the message alone does not show it (any more)."""
    if failure.method not in METHODS or not _fails(channel, failure.method, failure.message):
        return failure
    message, tries, part = failure.message, TRIES, len(failure.message) // 2
    while part and tries:
        at = 0
        while at < len(message) and tries:
            tries -= 1
            shorter = message[:at] + message[at + part :]
            if _fails(channel, failure.method, shorter):
                message = shorter
            else:
                at += part
        part //= 2
    return replace(failure, what=f"{failure.what} (the message alone shows it)", message=message)


def _fails(channel: grpc.Channel, method: str, message: bytes) -> bool:
    call = channel.unary_stream(method, None, None)(message, timeout=TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            break
    call.cancel()  # type: ignore[no-untyped-call]
    return call.code() is not None and call.code().name in NEVER
