"""Publishing by rank 0 of a session: weights through the publisher to the service, commits and checkpoints.

Invariant: weights are available before the service offers them. They are removed only after the service has said that
they are not needed any more.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from buffer_wire.errors import BatchNotReady, InvalidField, RolloutBufferError
from trainer_client.client.driver import worth_repeating
from trainer_client.client.engines import in_service
from trainer_client.client.operations import ServiceClient
from trainer_client.manifest import (
    AdapterManifest,
    CollectiveManifest,
    FilesManifest,
    Manifest,
    TensorsManifest,
    manifest_of,
)
from trainer_client.publish.publication import Publication, RepeatingPublisher, WeightPublisher, WeightSource
from trainer_client.session.clock import TrainClock
from trainer_client.session.metrics import StepMeter
from trainer_client.session.plan import SessionPlan
from trainer_client.state import Resumed, RunState, WeightVersion
from trainer_client.waiting import OnWait

logger = logging.getLogger("trainer_client")

POLL_EVERY_S = 5.0
"""Interval, in seconds, between two checks, while the trainer waits for a batch, that some engine can generate it."""
_ASK_S = 5.0
_RETAINED_STEPS = 64
"""Default of the policy's retained_steps."""


def manifest_for(source: WeightSource, publisher: WeightPublisher | None, publication: Publication) -> Manifest | None:
    """Make the manifest to publish for a source: a manifest or None as it is, else the publisher's manifest, if there
    is one.

    Raises InvalidField for a source that needs a publisher, and the publisher's errors.
    """
    if source is None or isinstance(source, FilesManifest | TensorsManifest | CollectiveManifest | AdapterManifest):
        return source
    if publisher is not None:
        return publisher.offer(source, publication)
    if not isinstance(source, Path | str):
        raise InvalidField("source", type(source).__name__, "a directory or a manifest, where there is no publisher")
    return manifest_of(Path(source))


@dataclass(frozen=True, slots=True)
class Asked:
    """Publish that was last requested of the service."""

    version: int = 0
    manifest: Manifest | None = None
    answered: bool = True
    """False as long as it is not known whether the publish took effect."""


class Publishing:
    """Publishes, commits and checkpoints of one term."""

    def __init__(
        self,
        client: ServiceClient,
        plan: SessionPlan,
        run: RunState,
        start: Resumed,
        clock: TrainClock,
        meter: StepMeter,
        on_wait: OnWait | None,
    ) -> None:
        self._client = client
        self._clock, self._meter = clock, meter
        self._run_id, self._rank, self._world_size = plan.run_id, plan.rank, plan.world_size
        self._publisher = plan.publisher
        self._start = start
        self._committed_steps = min(run.committed_steps, start.next_step)
        self.retained_steps = run.policy.retained_steps
        """Value of the policy's retained_steps; None: its default."""
        self._on_wait = on_wait
        self._asked = Asked()

    def next_version(self) -> int:
        """Return the next version that is free in this term.

        A publish that was answered with an error can still have taken effect, without enough replicas or with its reply
        lost. Then its number is taken. The weights that are published next are others, and need a number of their own.
        """
        asked, version = self._asked, self._clock.version
        if not asked.answered or asked.version > version:
            run = self._client.run(self._run_id)
            if run.term == self._start.term:
                if run.published.version == asked.version:
                    self._took_effect(asked.manifest, run.committed_steps)
                self._clock.correct(run.published.version)
        return self._clock.version + 1

    def publish(self, source: WeightSource, version: int, commit_through: int | None) -> None:
        """Offer `source` as `version` and commit. Raises what `TrainerSession.publish` raises."""
        manifest = manifest_for(source, self._publisher, self._publication(version))
        self._publish(version, manifest, commit_through)

    def rollback(self, to_version: int, version: int) -> None:
        """Offer the weights of `to_version` as `version`; commits nothing. Raises InvalidField."""
        if self._publisher is None:
            raise InvalidField("publisher", None, "one that keeps versions, to roll back to one")
        self._publish(version, self._publisher.offer_again(to_version, self._publication(version)), None)

    def commit(self, steps: int) -> None:
        """Commit the first `steps` steps as trained."""
        if steps > self._committed_steps:
            self._committed_steps = self._client.commit(self._run_id, term=self._start.term, through_step=steps - 1)

    def checkpoint(self, steps: int) -> None:
        """Report that the trainer's own checkpoint holds the first `steps` steps."""
        if steps > 0:
            freed = self._client.checkpoint(self._run_id, term=self._start.term, through_step=steps - 1)
            if self._publisher is not None:
                self._publisher.checkpointed(freed)

    def can_repeat(self) -> bool:
        """True when engines can get the published weights by a repetition only, and the publisher can repeat them."""
        publisher = self._publisher
        return self._rank == 0 and isinstance(publisher, RepeatingPublisher) and publisher.repeats(self._clock.version)

    def repeat(self) -> None:
        """Offer the published weights once more, under a new version; nothing when no engine could take them.

        No step is in them that was not before, so nothing is committed. Raises StaleTerm, VersionConflict and other
        errors that a later try cannot cure.
        """
        publisher = self._publisher
        if not isinstance(publisher, RepeatingPublisher):
            return
        if self._world_size > 1:
            # Their clocks would not know of the version, and judge what they pull by one too low.
            logger.warning("version %d has to be published once more, by all ranks together", self._clock.version)
            return
        version = self.next_version()
        try:
            self._publish(version, publisher.repeat(self._publication(version)), None)
        except RolloutBufferError as error:
            if not worth_repeating(error):
                raise
            logger.warning("the published weights could not be offered again as version %d: %s", version, error)
            return
        self._clock.correct(version)
        self._meter.version = version

    def _publication(self, version: int) -> Publication:
        return Publication(self._client, self._run_id, self._start.term, version, self._on_wait)

    def _publish(self, version: int, manifest: Manifest | None, commit_through: int | None) -> None:
        self._asked = Asked(version, manifest, answered=False)
        done = self._client.publish(
            self._run_id,
            term=self._start.term,
            version=version,
            manifest=manifest,
            commit_through=commit_through,
            time_spent=self._meter.time_spent(),
        )
        self._took_effect(manifest, done.committed_steps)
        self._asked = Asked(version)

    def _took_effect(self, manifest: Manifest | None, committed_steps: int) -> None:
        self._committed_steps = committed_steps
        if self._publisher is not None and manifest is not None:
            self._publisher.published(manifest, committed_steps=committed_steps)
            # The service itself frees committed steps beyond this many.
            self._publisher.checkpointed(committed_steps - (self.retained_steps or _RETAINED_STEPS))


@dataclass(slots=True)
class Repeater:
    """Callback for every wait for a batch: offers the published weights again where no engine has any.

    `repeat`: offers them under a new version. It acts after two checks in a row, `POLL_EVERY_S` apart, that found
    engines waiting for weights and none that serves. A single check may fall into a publish.
    """

    look: Callable[[float], RunState]
    can_repeat: Callable[[], bool]
    repeat: Callable[[], None]
    start: Resumed
    clock: Callable[[], float] = time.monotonic
    _looked_at: float = field(default=0.0, init=False)
    _seen: WeightVersion | None = field(default=None, init=False)
    """Version that no engine had at the last check."""

    def begin(self) -> None:
        """Begin a wait of the trainer."""
        self._looked_at, self._seen = self.clock(), None

    def __call__(self, error: RolloutBufferError) -> None:
        """Handle one failed attempt of the wait, `error`. Raises what `repeat` raises."""
        now = self.clock()
        if not isinstance(error, BatchNotReady) or now - self._looked_at < POLL_EVERY_S or not self.can_repeat():
            return
        try:
            run = self.look(_ASK_S)
        except RolloutBufferError as failed:
            if not worth_repeating(failed):
                raise
            self._looked_at = self.clock()
            return
        self._looked_at = self.clock()
        waiting = engines_without_weights(run, self.start)
        if not waiting:
            self._seen = None
        elif self._seen != run.published:
            self._seen = run.published
        else:
            logger.warning(
                "no engine has version %d, and %s can have it by a broadcast only",
                run.published.version,
                ", ".join(waiting),
            )
            self.repeat()
            self._looked_at, self._seen = self.clock(), None


def engines_without_weights(run: RunState, start: Resumed) -> tuple[str, ...]:
    """Name the engines that wait for weights, where no engine in service has any that are fresh enough to generate
    with.

    Fresh enough: ready, within the policy's max_staleness of the published version; or loading, and at that version
    already. An engine that took its version from an earlier trainer counts as at most at the resume's.
    """
    if run.paused or run.draining or run.term != start.term:
        return ()
    most = run.policy.max_staleness
    oldest = 0 if most is None else run.published.version - most
    waiting = []
    for engine in in_service(run):
        loaded = engine.loaded.version
        if engine.loaded.term != run.term:
            loaded = min(loaded, start.version)
        if loaded >= (oldest if engine.state == "ready" else run.published.version):
            return ()
        if engine.state != "starting":
            waiting.append(engine.engine_id)
    return tuple(waiting)
