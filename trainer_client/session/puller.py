"""Puller of rounds of steps, in the trainer's own thread when it asks for them. A whole batch is one round.

Invariants: the pull of a step's first round states the version that will train on the step; the later ones state none.
A trainer that waits hears at least every two seconds on whom, and within that time of errors in the background.
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
from trainer_client.rounds import Place
from trainer_client.session.clock import TrainClock
from trainer_client.waiting import OnWait, WaitNotices

logger = logging.getLogger("trainer_client")


PullRound: TypeAlias = Callable[[Place, int | None, Deadline], Batch]
"""Callable that tries once to pull a round for a train_version, None for that of the step's earlier rounds.

It raises the client's errors.
"""


def pulls_of(client: ServiceClient, run_id: str, shard: PullSpec, groups_of: Callable[[int], int | None]) -> PullRound:
    """Make the callable that pulls rounds of the run at the service.

    `shard`: a pull of the epoch and rank. `groups_of`: gives N of a step; None: the policy's.
    """

    def pull(place: Place, train_version: int | None, within: Deadline) -> Batch:
        # The pull that closes the first round decides on N.
        n = groups_of(place.step) if place.round == 0 else None
        spec = replace(shard, step=place.step, round=place.round, train_version=train_version, batch_groups=n)
        return client.try_pull(run_id, spec, within)

    return pull


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSource:
    """Source of a puller: the calls and conditions that it depends on."""

    pull: PullRound
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

    def notices(self, place: Place) -> WaitNotices:
        """Make the notices of the trainer's own wait for a round."""
        return WaitNotices(f"pulling {place}", self.loop.service, self.on_wait)

    def waits(self, notices: WaitNotices, error: RolloutBufferError) -> None:
        """Report that the trainer itself goes on waiting, because of `error`."""
        notices.tell(error)
        if self.while_waiting is not None:
            self.while_waiting(error)

    def attempt(self, clock: TrainClock, place: Place, within: Deadline) -> Batch | None:
        """Try once to pull a round; None when no more comes, because all tasks are used up or the run was drained.

        Raises the client's errors.
        """
        ended = self.exhausted()
        try:
            return self._pulled(clock, place, within)
        except RolloutBufferError as error:
            if not nothing_to_come(error, ended=ended):
                raise
            logger.info("no batches are to come: %s", error)
            return None

    def _pulled(self, clock: TrainClock, place: Place, within: Deadline) -> Batch:
        """Pull the round for the right train_version.

        Where the service calls a version too low (somebody published meanwhile), it is corrected and the pull repeated.
        """
        if place.round:
            return self.pull(place, None, within)
        version = clock.train_version(place.step)
        try:
            return self.pull(place, version, within)
        except InvalidField as error:
            if error.attributes.get("field") != "train_version":
                raise
            clock.correct(self.published())
            corrected = clock.train_version(place.step)
            if corrected <= version:
                raise
            return self.pull(place, corrected, within)


@dataclass(frozen=True, slots=True)
class Puller:
    """Puller without a thread of its own: it pulls in the calling thread."""

    source: PullSource
    clock: TrainClock
    timeout_s: float
    """Longest wait, in seconds, for one round."""

    def take(self, place: Place) -> Batch | None:
        """Pull the round at `place`; None when no more comes, because all tasks are used up or the run was drained.

        Raises BatchNotReady or ServiceUnreachable after the timeout, everything else at once.
        """
        source = self.source
        notices = source.notices(place)

        def told(error: RolloutBufferError) -> None:
            source.waits(notices, error)
            source.check()

        source.check()
        try:
            return source.loop.run(lambda within: source.attempt(self.clock, place, within), told, self.timeout_s)
        except RolloutBufferError as error:
            if worth_repeating(error):
                error.add_note(f"waited {self.timeout_s} s for {place}")
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
