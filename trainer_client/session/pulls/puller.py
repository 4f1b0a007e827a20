"""Puller of micro-batches of steps, in the trainer's own thread when it asks for them. A whole batch is one
micro-batch.

Invariants: the pull of a step's first micro-batch states the version that will train on the step; the later ones state
none. A trainer that waits hears at least every two seconds on whom, and within that time of errors in the background.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from buffer_wire.errors import BatchNotReady, InvalidField, RolloutBufferError
from trainer_client.batch import Batch
from trainer_client.client.driver import Deadline, is_drained, worth_repeating
from trainer_client.client.operations import ServiceClient
from trainer_client.client.pulling import PullLoop, PullSpec
from trainer_client.micro_batches import PullKey
from trainer_client.session.clock import TrainClock
from trainer_client.waiting import OnWait, WaitNotices

logger = logging.getLogger("trainer_client")


PullMicroBatch: TypeAlias = Callable[[PullKey, int | None, Deadline], Batch]
"""Callable that tries once to pull a micro-batch for a train_version, None for that of the step's earlier
micro-batches.

It raises the client's errors.
"""


def pulls_of(
    client: ServiceClient, run_id: str, shard: PullSpec, groups_of: Callable[[int], int | None]
) -> PullMicroBatch:
    """Make the callable that pulls micro-batches of the run at the service.

    `shard`: a pull of the term and rank. `groups_of`: gives N of a step; None: the policy's.
    """

    def pull(pull_key: PullKey, train_version: int | None, within: Deadline) -> Batch:
        # The pull that closes the first micro-batch decides on N.
        n = groups_of(pull_key.step) if pull_key.micro_batch == 0 else None
        spec = replace(
            shard, step=pull_key.step, micro_batch=pull_key.micro_batch, train_version=train_version, batch_groups=n
        )
        return client.try_pull(run_id, spec, within)

    return pull


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSource:
    """Source of a puller: the calls and conditions that it depends on."""

    pull: PullMicroBatch
    published: Callable[[], int]
    """Callable that asks the service for the published version."""
    exhausted: Callable[[], bool]
    """Callable that returns True when no task will be submitted any more."""
    check: Callable[[], None]
    """Callable that raises errors of the background work."""
    loop: PullLoop
    """Loop in which pulls wait, shared by all tries."""
    on_wait: OnWait | None = None
    """Callback for every wait of the trainer itself."""
    while_waiting: Callable[[RolloutBufferError], None] | None = None
    """Callback for every such wait, in the trainer's thread; it may act on the error. What it raises ends the wait."""

    def notices(self, pull_key: PullKey) -> WaitNotices:
        """Make the notices of the trainer's own wait for a micro-batch."""
        return WaitNotices(f"pulling {pull_key}", self.loop.service, self.on_wait)

    def waits(self, notices: WaitNotices, error: RolloutBufferError) -> None:
        """Report that the trainer itself goes on waiting, because of `error`."""
        notices.tell(error)
        if self.while_waiting is not None:
            self.while_waiting(error)

    def attempt(self, clock: TrainClock, pull_key: PullKey, within: Deadline) -> Batch | None:
        """Try once to pull a micro-batch; None when no more comes, because all tasks are used up or the run was
        drained.

        Raises the client's errors.
        """
        ended = self.exhausted()
        try:
            return self._pulled(clock, pull_key, within)
        except RolloutBufferError as error:
            if not nothing_to_come(error, ended=ended):
                raise
            logger.info("no batches are to come: %s", error)
            return None

    def _pulled(self, clock: TrainClock, pull_key: PullKey, within: Deadline) -> Batch:
        """Pull the micro-batch for the right train_version.

        Where the service calls a version too low (somebody published meanwhile), it is corrected and the pull repeated.
        """
        if pull_key.micro_batch:
            return self.pull(pull_key, None, within)
        version = clock.train_version(pull_key.step)
        try:
            return self.pull(pull_key, version, within)
        except InvalidField as error:
            if error.attributes.get("field") != "train_version":
                raise
            clock.correct(self.published())
            corrected = clock.train_version(pull_key.step)
            if corrected <= version:
                raise
            return self.pull(pull_key, corrected, within)


@dataclass(frozen=True, slots=True)
class Puller:
    """Puller without a thread of its own: it pulls in the calling thread."""

    source: PullSource
    clock: TrainClock
    timeout_s: float
    """Longest wait, in seconds, for one micro-batch."""

    def take(self, pull_key: PullKey) -> Batch | None:
        """Pull the micro-batch at `pull_key`; None when no more comes, because all tasks are used up or the run was
        drained.

        Raises BatchNotReady or ServiceUnreachable after the timeout, everything else at once.
        """
        source = self.source
        notices = source.notices(pull_key)

        def told(error: RolloutBufferError) -> None:
            source.waits(notices, error)
            source.check()

        source.check()
        try:
            return source.loop.run(lambda within: source.attempt(self.clock, pull_key, within), told, self.timeout_s)
        except RolloutBufferError as error:
            if worth_repeating(error):
                error.add_note(f"waited {self.timeout_s} s for {pull_key}")
            raise

    def stop(self) -> None:
        """Do nothing: no thread runs in the background."""


def nothing_to_come(error: RolloutBufferError, *, ended: bool) -> bool:
    """True when the step can never fill.

    That is so when the run is drained. It is so too when all tasks were submitted (`ended`) and none is pending or
    being generated.
    """
    if is_drained(error):
        return True
    data = error.attributes
    used_up = isinstance(error, BatchNotReady) and data.get("pending") == "0" and data.get("leased") == "0"
    return ended and used_up
