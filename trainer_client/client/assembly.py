"""Assembly of a pull stream into a batch."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from buffer_wire.codec import Delivered, split_pull
from buffer_wire.messages import value_of
from buffer_wire.revisions import Revisions
from buffer_wire.status import ServiceUnreachable
from trainer_client.batch import Batch, BatchInfo, Group

if TYPE_CHECKING:
    from rollout_buffer.v1 import batches_pb2


@dataclass(slots=True)
class PullAssembly:
    """Assembly of one pull attempt; keeps the stream's messages as bytes, undivided, behind the batch."""

    run_id: str
    revisions: Revisions
    started: float
    """Time, on the monotonic clock, at which the pull began."""
    _info: "batches_pb2.BatchInfo | None" = field(default=None, init=False)
    _groups: list[Delivered] = field(default_factory=list, init=False)
    _received_bytes: int = field(default=0, init=False)

    def add(self, message: bytes) -> None:
        """Add the next message. Raises MalformedMessage."""
        revision, info, groups = split_pull(message)
        self.revisions.note(self.run_id, revision)
        if info is not None:
            self._info = info
        self._groups.extend(groups)
        self._received_bytes += len(message)

    def finish(self) -> Batch:
        """Build the batch, after the stream's regular end.

        Raises ServiceUnreachable (retryable) if the stream was cut.
        """
        info = self._info
        if info is None or len(self._groups) != info.shard_groups:
            wanted = "no batch facts" if info is None else f"{len(self._groups)} of {info.shard_groups} groups"
            raise ServiceUnreachable(f"the pull stream ended early, with {wanted}", status="CUT")
        groups = tuple(Group.of(delivered, info.train_version) for delivered in self._groups)
        facts = value_of(
            BatchInfo, info, staleness_mean=info.staleness_mean_milli / 1000, waited_s=time.monotonic() - self.started
        )
        return Batch(facts, groups, self._received_bytes)
