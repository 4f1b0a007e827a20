"""What the blocking and the asyncio client share: limits of their waits and the decision what to repeat."""

import time
from dataclasses import dataclass

from buffer_wire.access import Access
from buffer_wire.channel import Options, client_options
from buffer_wire.errors import RolloutBufferError, RunPaused
from buffer_wire.limits import MAX_MESSAGE_BYTES
from trainer_client.field_names import NamedFields

PULL_SLICE_S = 2.0
"""Longest wait of one pull attempt at the service: how soon a caller hears on whom a pull waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions(Access, NamedFields):
    """How a client gets in (see Access), connects, and how long it keeps trying."""

    timeout_s: float = 300.0
    """How long a call is repeated while the service does not answer or is not ready, unless the call says."""
    attempt_timeout_s: float = 20.0
    """Longest wait for one answer."""
    transfer_timeout_s: float = 600.0
    """Longest time that the transfer of one shard may take after its wait."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest message accepted; at least the service's limit."""

    def channel_options(self) -> Options:
        """Options of one gRPC channel."""
        return client_options(self.max_message_bytes)


def worth_repeating(error: RolloutBufferError) -> bool:
    """True when the same request can succeed later: a server that shuts down cancels what it was doing, and a run that
    an operator holds is continued by one.
    """
    return error.retryable or is_held(error) or error.attributes.get("status") == "CANCELLED"


def is_held(error: RolloutBufferError) -> bool:
    """True when an operator has paused the run."""
    return isinstance(error, RunPaused) and error.attributes.get("why") == "operator"


def is_drained(error: RolloutBufferError) -> bool:
    """True when an operator has let the run end, and nothing comes any more."""
    return isinstance(error, RunPaused) and error.attributes.get("why") == "drained"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock, and when the wait began."""

    started: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """`timeout_s` from now."""
        now = time.monotonic()
        return cls(now, now + timeout_s)

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.at - time.monotonic())
