"""Prefetcher: pulls batches ahead of the training loop, in a thread of its own; in a run that streams, micro-batches.

Invariants: micro-batches come in order, each once. No step more than `prefetch` beyond the one that the trainer has is
pulled. No further pull begins while the bytes held and the largest batch seen would together exceed `max_bytes`. Errors
of the thread are raised in the trainer's; those of the service only after one more try while the trainer itself waits.
BatchNotReady is raised only to a trainer that itself has waited for `timeout_s`.
"""

import logging
import threading
from collections import deque

from buffer_wire.errors import InvalidField, RolloutBufferError
from buffer_wire.status import ServiceUnreachable
from trainer_client.batch import Batch
from trainer_client.client.driver import PULL_SLICE_S, Deadline
from trainer_client.micro_batches import PullKey
from trainer_client.session.clock import TrainClock
from trainer_client.session.pulls.puller import PullSource

logger = logging.getLogger("trainer_client")

JOIN_S = 2 * PULL_SLICE_S


class Prefetcher:
    """Prefetcher of up to `prefetch` batches, used as `Puller` is, one place after the other."""

    def __init__(
        self,
        source: PullSource,
        clock: TrainClock,
        timeout_s: float,
        *,
        prefetch: int,
        max_bytes: int,
    ) -> None:
        if prefetch < 1:
            raise InvalidField("prefetch", prefetch, "at least 1")
        self._source = source
        self._clock = clock
        self._timeout_s = timeout_s
        self._prefetch = prefetch
        self._max_bytes = max_bytes
        self._next = PullKey(clock.handed_out)
        self._given_step = clock.handed_out - 1
        """Step of the newest micro-batch that the trainer has."""
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._largest_bytes = 0
        self._ended = False
        self._stopped = False
        self._failure: BaseException | None = None
        """Error that ended the thread; None while it goes on."""
        self._refusal: RolloutBufferError | None = None
        """Error of the service. The thread stands still until the trainer asks again."""
        self._not_yet: RolloutBufferError | None = None
        self._thread = threading.Thread(target=self._run, name="batch-prefetch", daemon=True)
        self._thread.start()

    def take(self, pull_key: PullKey) -> Batch | None:
        """Take the micro-batch at `pull_key`, as `Puller.take` does."""
        notices = self._source.notices(pull_key)
        deadline = Deadline.after(self._timeout_s)
        self._go_on()
        while (batch := self._take_ready(min(PULL_SLICE_S, deadline.left_s()))) is None:
            self._source.check()
            if (error := self._failure or self._refusal) is not None:
                raise error
            if self._ended:
                return None
            waiting_for = self._not_yet
            if deadline.left_s() == 0.0:
                raise waiting_for or ServiceUnreachable(
                    f"no answer to the pull of {pull_key} within {self._timeout_s} s", status="DEADLINE_EXCEEDED"
                )
            if waiting_for is not None:
                self._source.waits(notices, waiting_for)
        return batch

    def stop(self) -> None:
        """End the background pulls; waits a little for the thread."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            logger.warning("the prefetching thread still waits on the service")

    def _take_ready(self, wait_s: float) -> Batch | None:
        """Take the next batch held; None when there is none after `wait_s`, or no more comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._failure or self._refusal, wait_s)
            if not self._ready:
                return None
            batch = self._ready.popleft()
            self._given_step = batch.step
            self._changed.notify_all()
            return batch

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                batch = self._pull_next()
                with self._changed:
                    if batch is None:
                        self._ended = True
                    elif not self._stopped:
                        self._largest_bytes = max(self._largest_bytes, batch.received_bytes)
                        self._next = PullKey.after(batch)
                        self._not_yet = None
                        self._ready.append(batch)
                    self._changed.notify_all()
                    if self._ended:
                        return
        except BaseException as error:  # noqa: BLE001 - handed over to the trainer's thread, whatever it is
            error.add_note(self._where())
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _where(self) -> str:
        return f"raised while prefetching {self._next}"

    def _go_on(self) -> None:
        """Let the thread try again after an error of the service: somebody may have removed the cause."""
        with self._changed:
            self._refusal = None
            self._changed.notify_all()

    def _refused(self, error: RolloutBufferError) -> None:
        """Leave `error` to the trainer; returns when the trainer asks again, or when stopped."""
        error.add_note(self._where())
        with self._changed:
            self._refusal, self._not_yet = error, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._refusal is None)

    def _wait_for_room(self) -> bool:
        """Wait until another micro-batch may be held; False when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._ready or self._has_room())
            return not self._stopped

    def _has_room(self) -> bool:
        held = sum(batch.received_bytes for batch in self._ready)
        near = self._next.step <= self._given_step + self._prefetch
        return near and held + self._largest_bytes <= self._max_bytes

    def _pull_next(self) -> Batch | None:
        """Pull the next micro-batch, however long it takes; None when no more comes, or when stopped."""
        while not self._stopped:
            try:
                return self._source.loop.run(self._attempt, self._keep_trying)
            except RolloutBufferError as error:
                if not self._stopped:
                    self._refused(error)
        return None

    def _attempt(self, within: Deadline) -> Batch | None:
        return self._source.attempt(self._clock, self._next, within)

    def _keep_trying(self, error: RolloutBufferError) -> None:
        self._not_yet = error
        if self._stopped:
            raise error
