"""Batches by step, pulled in the trainer's own thread when it asks for them.

Invariants: every pull states the version that will train on the batch; a trainer that waits hears on whom at least
every two seconds, and of what else went wrong in the background as soon.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from buffer_wire.errors import BatchNotReady, InvalidField, RolloutBufferError
from trainer_client.batch import Batch
from trainer_client.clock import TrainClock
from trainer_client.driver import PULL_SLICE_S, Deadline, worth_repeating
from trainer_client.waiting import OnWait, WaitNotices

logger = logging.getLogger("trainer_client")


class PullStep(Protocol):
    """One pull of a step for a version, waiting up to `timeout_s`; the client's, or a test's stand-in."""

    def __call__(self, step: int, train_version: int, timeout_s: float, on_wait: OnWait | None) -> Batch:
        """The shard, or the client's errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSource:
    """What a puller needs to know of its surroundings."""

    pull: PullStep
    published: Callable[[], int]
    """Asks the service for the published version."""
    exhausted: Callable[[], bool]
    """True when no task will be submitted any more."""
    check: Callable[[], None]
    """Raises what else went wrong in the background."""
    service: str
    """Its address, for notices."""
    on_wait: OnWait | None = None
    """Told while the trainer itself waits."""

    def attempt(self, clock: TrainClock, step: int, wait_s: float, on_wait: OnWait | None) -> Batch:
        """One pull of up to `wait_s` with the right train_version.

        A version that the service calls too low (somebody published meanwhile) is corrected and asked for again.
        """
        version = clock.train_version(step)
        try:
            return self.pull(step, version, wait_s, on_wait)
        except InvalidField as error:
            if error.attributes.get("field") != "train_version":
                raise
            clock.correct(self.published())
            corrected = clock.train_version(step)
            if corrected <= version:
                raise
            return self.pull(step, corrected, wait_s, on_wait)


class Puller:
    """Pulls in the thread that asks."""

    def __init__(self, source: PullSource, clock: TrainClock, timeout_s: float) -> None:
        self._source = source
        self._clock = clock
        self._timeout_s = timeout_s

    def take(self, step: int) -> Batch | None:
        """The batch of `step`; None when there will be none because all tasks are used up.

        Raises BatchNotReady or ServiceUnreachable after the timeout, everything else at once.
        """
        source = self._source
        notices = WaitNotices(f"pulling step {step}", source.service, source.on_wait)
        deadline = Deadline.after(self._timeout_s)
        while True:
            source.check()
            ended = source.exhausted()
            wait_s = min(deadline.left_s(), PULL_SLICE_S)
            try:
                return source.attempt(self._clock, step, wait_s, lambda waiting: notices.tell(waiting.error))
            except RolloutBufferError as error:
                if ended and nothing_to_come(error):
                    logger.info("all tasks are used up: %s", error)
                    return None
                if not worth_repeating(error):
                    raise
                if deadline.left_s() == 0.0:
                    error.add_note(f"waited {self._timeout_s} s for step {step}")
                    raise
                notices.tell(error)

    def stop(self) -> None:
        """Nothing runs in the background."""


def nothing_to_come(error: RolloutBufferError) -> bool:
    """True when no task is pending or being generated, so that the step can never fill."""
    data = error.attributes
    return isinstance(error, BatchNotReady) and data.get("pending") == "0" and data.get("leased") == "0"
