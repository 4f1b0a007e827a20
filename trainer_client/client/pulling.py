"""Pull: its specification, and the loop in which a pull waits, for both clients, sessions and data sets.

Invariants: every try that fails is reported before the next one. No try begins after the time is up. The service holds
a try for at most `PULL_SLICE_S`, so that a caller hears at least that often on whom it waits.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from buffer_wire.connection.retry import Backoff, Mend, Retry, Tokens
from buffer_wire.errors import BatchNotReady, RolloutBufferError
from rollout_buffer.v1 import batches_pb2, common_pb2
from trainer_client.client import requests
from trainer_client.client.call import Call
from trainer_client.client.driver import Deadline, worth_repeating
from trainer_client.micro_batches import PullKey

if TYPE_CHECKING:
    from trainer_client.batch import BatchInfo

T = TypeVar("T")

PULL_METHOD = "/rollout_buffer.v1.BatchService/PullBatch"

MIN_PULL_INTERVAL_S = 0.05
"""Shortest interval, in seconds, between two tries; it matters if the service does not hold the wait that it was asked
for."""

Told: TypeAlias = Callable[[RolloutBufferError], None]
"""Callback for every try that failed and is repeated. What it raises ends the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    """Specification of a pull: the term, step and micro-batch, and the rank whose shard is wanted."""

    term: int
    step: int
    """Step: the next unassembled one, or any earlier one that is still retained."""
    rank: int = 0
    world_size: int = 1
    """Number of ranks, fixed for a term by its first pull."""
    train_version: int | None = None
    """Version whose weights will train on the batch; None: that of the step's earlier micro-batches, or the published
    one.
    """
    micro_batch: int = 0
    """Number of the micro-batch, from 0: any that has closed, or the next."""
    batch_groups: int | None = None
    """Number of groups N of this step; None: the policy's. The pull that closes the first micro-batch decides."""
    commit_through: int | None = None
    """Step through which the pull commits first, as `commit` does; None: it commits nothing."""
    checkpoint_through: int | None = None
    """Step through which it checkpoints then, as `checkpoint` does; None: it frees nothing."""

    def following(self) -> "PullSpec":
        """Return the spec of the step's next micro-batch."""
        return PullSpec(
            term=self.term,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=self.micro_batch + 1,
        )

    def left_undone(self, run_id: str, info: "BatchInfo | None" = None) -> Iterator[Call[Any, int]]:
        """Make the calls that commit and checkpoint what a pull did not: the service does not know that pulls can.

        `info`: facts of the pulled batch; None: the pull was answered without any.
        """
        done = (0, 0) if info is None else (info.committed_steps, info.checkpointed_steps)
        if self.commit_through is not None and done[0] <= self.commit_through:
            yield requests.commit(run_id, term=self.term, through_step=self.commit_through)
        if self.checkpoint_through is not None and done[1] <= self.checkpoint_through:
            yield requests.checkpoint(run_id, term=self.term, through_step=self.checkpoint_through)

    def __str__(self) -> str:
        return str(PullKey(self.step, self.micro_batch))

    def to_wire(self, ref: common_pb2.RunRef, wait_s: float, *, direct: bool = False) -> batches_pb2.PullBatchRequest:
        """Build the request of one attempt that waits up to `wait_s` at the service; `direct`: large groups as keys."""
        fields = asdict(self)
        return batches_pb2.PullBatchRequest(
            run=ref,
            wait_ms=round(wait_s * 1000),
            direct=direct,
            reads_parts=True,
            reads_stages=True,
            commit_through_step=fields.pop("commit_through"),
            checkpoint_through_step=fields.pop("checkpoint_through"),
            **fields,
        )


def _pause(error: RolloutBufferError) -> float | None:
    """Choose a short pause after BatchNotReady, because the service itself has waited; None: the usual back-off."""
    return MIN_PULL_INTERVAL_S if isinstance(error, BatchNotReady) else None


_BACKOFF = Backoff(ceiling_s=1.0, pause=_pause)


@dataclass(frozen=True, slots=True)
class PullLoop:
    """Loop that repeats a try until it succeeds, the time is up, or an error comes that no later try can cure."""

    service: str
    """Address of the service, for notices."""
    tokens: Tokens | None = None
    mend: Mend | None = None

    def run(self, attempt: Callable[[Deadline], T], told: Told, timeout_s: float = math.inf) -> T:
        """Return the first result of `attempt`, which is called with the deadline of the whole pull."""
        within = Deadline.after(timeout_s)
        return self._retry(told, timeout_s).blocking(lambda: attempt(within))

    async def run_async(self, attempt: Callable[[Deadline], Awaitable[T]], told: Told, timeout_s: float) -> T:
        """Do what `run` does, for coroutines."""
        within = Deadline.after(timeout_s)
        return await self._retry(told, timeout_s).asyncio(lambda: attempt(within))

    def _retry(self, told: Told, timeout_s: float) -> Retry:
        return Retry(
            deadline_s=timeout_s,
            waiting_on=f"the service at {self.service}",
            backoff=_BACKOFF,
            retry_on=worth_repeating,
            on_retry=lambda error, _attempts, _wait_s: told(error),
            tokens=self.tokens,
            mend=self.mend,
        )
