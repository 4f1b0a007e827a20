"""Assembly of a pull stream into a batch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from buffer_wire.codec import Buffer, Delivered, split_pull
from buffer_wire.messages import value_of
from buffer_wire.revisions import Revisions
from buffer_wire.status import ServiceUnreachable
from trainer_client.batch import Batch, BatchInfo, Group

if TYPE_CHECKING:
    from rollout_buffer.v1 import batches_pb2


@dataclass(slots=True)
class PullAssembly:
    """Assembly of one pull attempt; keeps the stream's messages, and what is read, undivided behind the batch."""

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

    @property
    def keys(self) -> list[str]:
        """Keys of the groups whose bodies are to be read, in order."""
        return [group.payload_key for group in self._groups if group.payload_key]

    def fill(self, bodies: Sequence[Buffer]) -> None:
        """Put the bodies that lie under `keys` into their groups."""
        read = iter(bodies)
        self._groups = [
            one._replace(body=next(read), payload_key="") if one.payload_key else one for one in self._groups
        ]
        self._received_bytes += sum(map(len, bodies))

    def finish(self) -> Batch:
        """Build the batch, after the stream's regular end. A group whose body was not read counts as missing.

        Raises ServiceUnreachable (retryable) if the stream was cut.
        """
        info = self._info
        came = sum(not one.stage and not one.payload_key for one in self._groups)
        if info is None or came != info.shard_groups:
            wanted = "no batch facts" if info is None else f"{came} of {info.shard_groups} groups"
            raise ServiceUnreachable(f"the pull stream ended early, with {wanted}", status="CUT")
        groups = tuple(Group.of(one, info.train_version, stages) for one, stages in self._with_stages())
        facts = value_of(
            BatchInfo, info, staleness_mean=info.staleness_mean_milli / 1000, waited_s=time.monotonic() - self.started
        )
        return Batch(facts, groups, self._received_bytes)

    def _with_stages(self) -> list[tuple[Delivered, list[Delivered]]]:
        """Pair each group with what stages have added, which comes right behind it."""
        pairs: list[tuple[Delivered, list[Delivered]]] = []
        for one in self._groups:
            if not one.stage:
                pairs.append((one, []))
            elif pairs:
                pairs[-1][1].append(one)
        return pairs
