"""What is pulled, and the one loop in which a pull waits, of both clients, of sessions and of data sets.

Invariants: every try that comes to nothing is told before the next one; no try begins after the time is up; the service
holds a try for at most `PULL_SLICE_S`, so that a caller hears as often on whom it waits.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from buffer_wire.errors import BatchNotReady, RolloutBufferError
from buffer_wire.retry import Backoff, Mend, OnRetry, Tokens, retry_async, retry_sync
from rollout_buffer.v1 import batches_pb2, common_pb2
from trainer_client.client.driver import Deadline, worth_repeating
from trainer_client.rounds import Place

T = TypeVar("T")

PULL_METHOD = "/rollout_buffer.v1.BatchService/PullBatch"

MIN_PULL_INTERVAL_S = 0.05
"""Least time between two tries, should the service not hold the wait that it was asked for."""

Told: TypeAlias = Callable[[RolloutBufferError], None]
"""Told of every try that came to nothing and is repeated. What it raises ends the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    """Which shard of which round of which step."""

    epoch: int
    step: int
    """The next unassembled one, or any earlier one that is still retained."""
    rank: int = 0
    world_size: int = 1
    """Fixed for an epoch by its first pull."""
    train_version: int | None = None
    """The version whose weights will train on the batch; None: that of the step's earlier rounds, or the published."""
    round: int = 0
    """From 0: any closed one, or the next."""
    batch_groups: int | None = None
    """N of this step; None: the policy's. Whoever closes the first round decides."""

    def following(self) -> "PullSpec":
        """The step's next round."""
        return replace(self, round=self.round + 1, train_version=None, batch_groups=None)

    def __str__(self) -> str:
        return str(Place(self.step, self.round))

    def to_wire(self, ref: common_pb2.RunRef, wait_s: float) -> batches_pb2.PullBatchRequest:
        """The request of one attempt that waits up to `wait_s` at the service."""
        return batches_pb2.PullBatchRequest(
            run=ref,
            epoch=self.epoch,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            train_version=self.train_version,
            wait_ms=round(wait_s * 1000),
            round=self.round,
            batch_groups=self.batch_groups,
        )


def _pause(error: RolloutBufferError) -> float | None:
    """A batch that is not ready is asked for again soon: the service itself has waited."""
    return MIN_PULL_INTERVAL_S if isinstance(error, BatchNotReady) else None


_BACKOFF = Backoff(ceiling_s=1.0, pause=_pause)


def _on_retry(told: Told) -> OnRetry:
    return lambda error, _attempts, _wait_s: told(error)


@dataclass(frozen=True, slots=True)
class PullLoop:
    """Tries until one succeeds, the time is up, or an error comes that no later try can cure."""

    service: str
    """Its address, for notices."""
    tokens: Tokens | None = None
    mend: Mend | None = None

    @property
    def _waiting_on(self) -> str:
        return f"the service at {self.service}"

    def run(self, attempt: Callable[[Deadline], T], told: Told, timeout_s: float = math.inf) -> T:
        """The first result of `attempt`, which is given how long the whole pull may take."""
        within = Deadline.after(timeout_s)
        return retry_sync(
            lambda: attempt(within),
            deadline_s=timeout_s,
            waiting_on=self._waiting_on,
            backoff=_BACKOFF,
            retry_on=worth_repeating,
            on_retry=_on_retry(told),
            tokens=self.tokens,
            mend=self.mend,
        )

    async def run_async(self, attempt: Callable[[Deadline], Awaitable[T]], told: Told, timeout_s: float) -> T:
        """`run` for coroutines."""
        within = Deadline.after(timeout_s)
        return await retry_async(
            lambda: attempt(within),
            deadline_s=timeout_s,
            waiting_on=self._waiting_on,
            backoff=_BACKOFF,
            retry_on=worth_repeating,
            on_retry=_on_retry(told),
            tokens=self.tokens,
            mend=self.mend,
        )
