"""Rules that the blocking and the asyncio client share: limits of their waits, and the decision what to repeat."""

import time
from dataclasses import dataclass

from buffer_wire.connection.access import Access
from buffer_wire.connection.channel import Options, client_options
from buffer_wire.errors import RolloutBufferError, RunPaused
from buffer_wire.limits import MAX_MESSAGE_BYTES
from trainer_client.field_names import NamedFields

PULL_SLICE_S = 2.0
"""Longest wait of one pull attempt at the service, and so between two notices on whom the pull waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions(Access, NamedFields):
    """Options of a client: access (see Access), connection, and how long it keeps trying."""

    timeout_s: float = 300.0
    """Longest time, in seconds, over which a call is repeated while the service does not answer or is not ready; a call
    may set its own."""
    attempt_timeout_s: float = 20.0
    """Longest wait for one answer, in seconds."""
    transfer_timeout_s: float = 600.0
    """Longest time, in seconds, that the transfer of one shard may take after its wait."""
    direct_payloads: bool = True
    """Permission to read large groups from the store itself, where the service lets clients; False: all are relayed."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest message accepted, in bytes; at least the service's limit."""

    def channel_options(self) -> Options:
        """Options of one gRPC channel."""
        return client_options(self.max_message_bytes)


def worth_repeating(error: RolloutBufferError) -> bool:
    """True when the same request can succeed later. A server that shuts down cancels calls, and an operator continues a
    run that an operator has paused.
    """
    return error.retryable or is_held(error) or error.attributes.get("status") == "CANCELLED"


def is_held(error: RolloutBufferError) -> bool:
    """True when an operator has paused the run."""
    return isinstance(error, RunPaused) and error.attributes.get("why") == "operator"


def is_drained(error: RolloutBufferError) -> bool:
    """True when an operator has drained the run, so that nothing more comes."""
    return isinstance(error, RunPaused) and error.attributes.get("why") == "drained"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline on the monotonic clock, with the time at which the wait began."""

    started: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """Make a deadline `timeout_s` from now."""
        now = time.monotonic()
        return cls(now, now + timeout_s)

    def left_s(self) -> float:
        """Seconds left until the deadline, at least 0."""
        return max(0.0, self.at - time.monotonic())
