"""Groups on their way to the service, and the line in which they wait."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from buffer_wire.codec import Buffer
from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import groups_pb2

WRITTEN_PER_RELAYED = 4
"""Written groups in a bundle for each relayed one of that size: a call costs the service and the store as much as the
deciding of ten groups, and carries no payload here. Not more, for those that are written wait until it is full."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The final answer to a group; `error` where the outcome is invalid or refused."""

    outcome: str
    error: RolloutBufferError | None = None


@dataclass(slots=True, eq=False)
class Parcel:
    """Group on its way to the service."""

    header: groups_pb2.GroupHeader
    payload: Sequence[Buffer]
    """The payload in pieces."""
    size_bytes: int
    """Bytes that it takes in the window."""
    answer: asyncio.Future[PushResult | None]
    """Answer to the present try; None: it is to be tried again. Done while it is in line: it was withdrawn."""
    pieces: Sequence[Buffer] = ()
    """The serialized Group, as it is sent; empty: it is to be made ready, anew where it was before."""
    direct: bool = False
    """True while the payload lies in the store and was written there by this worker."""
    written: bool = False
    """True while the payload lies in the store: it is no part of the bundle."""
    misses: int = 0
    """Times that the service did not find it there."""
    rejections: int = 0
    answered: bool = True
    """True while each try so far had an answer: none can have been accepted unseen."""
    since: float = field(default_factory=time.monotonic)

    @property
    def bundle_bytes(self) -> int:
        """Bytes that it counts for in a bundle."""
        return self.size_bytes // WRITTEN_PER_RELAYED if self.written else self.size_bytes


class Outbox:
    """Parcels in order. Invariant: `bundle_bytes` is the sum over the parcels in line, and `relayed` the number of
    those with their payloads; both are kept and never recounted.
    """

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self.bundle_bytes = 0
        self.relayed = 0

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def first(self) -> Parcel:
        """The head of the line."""
        return self._parcels[0]

    def join(self, parcel: Parcel) -> None:
        """Put a parcel at the end of the line."""
        self._parcels.append(parcel)
        self._count(parcel, 1)

    def return_to_head(self, parcels: Sequence[Parcel]) -> None:
        """Put parcels at the head of the line again, in order."""
        self._parcels.extendleft(reversed(parcels))
        for parcel in parcels:
            self._count(parcel, 1)

    def take(self) -> Parcel:
        """Take the head of the line out."""
        parcel = self._parcels.popleft()
        self._count(parcel, -1)
        return parcel

    def _count(self, parcel: Parcel, sign: int) -> None:
        self.bundle_bytes += sign * parcel.bundle_bytes
        self.relayed += sign * (not parcel.written)
