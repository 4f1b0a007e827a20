"""Clock of weight versions: computes the version that will train on a step that is pulled ahead of its turn.

    train_version(s) = published version + publishes still to come before step s is trained

One publish follows every `batches_per_publish` steps, counted from the last one, as the service estimates it. There are
never more publishes to come than steps still to be trained before s. So a step pulled at the moment it is trained is
trained by the published version.

Weights that are offered again under a new version do not count as a publish after a step. The version rises by one, and
the publishes still to come stay as many.
"""

from threading import Lock


class TrainClock:
    """Clock of steps and versions in a trainer; shared by the training thread and the one that prefetches.

    `version`: the published version. `next_step`: the first step to train; steps below it are in the weights.
    Invariant: trained steps ≤ steps handed out ≤ trained steps + 1.
    """

    def __init__(self, version: int, next_step: int, batches_per_publish: int) -> None:
        self._lock = Lock()
        self._version = version
        self._published_steps = next_step
        self._handed_out = next_step
        self._trained = next_step
        self._batches_per_publish = batches_per_publish

    @property
    def version(self) -> int:
        """Published version, as far as this process knows."""
        return self._version

    @property
    def handed_out(self) -> int:
        """Number of steps handed to the training loop: every step below it has been."""
        return self._handed_out

    def hand_out(self, step: int) -> None:
        """Record that `step`, or its last micro-batch, goes to the training loop."""
        with self._lock:
            self._handed_out = step + 1

    def take_back(self, step: int) -> None:
        """Record that `step`, which was handed out whole, lacks groups: it is not trained yet."""
        with self._lock:
            self._handed_out = min(self._handed_out, step)
            self._trained = min(self._trained, step)

    def train(self) -> None:
        """Record that every step handed out is trained."""
        with self._lock:
            self._trained = self._handed_out

    def published(self, version: int) -> None:
        """Record the publish of `version`, which was trained on every step handed out so far."""
        with self._lock:
            self._version = version
            self._trained = self._published_steps = self._handed_out

    def correct(self, version: int) -> None:
        """Record `version` as published by somebody else, or as the new number of older weights.

        A lower version changes nothing.
        """
        with self._lock:
            self._version = max(self._version, version)

    def pace(self, batches_per_publish: int) -> None:
        """Set the number of steps between two publishes from now on."""
        with self._lock:
            self._batches_per_publish = batches_per_publish

    def train_version(self, step: int) -> int:
        """Compute the version that will train on `step`, which must not be trained yet."""
        with self._lock:
            by_count = (step - self._published_steps) // self._batches_per_publish
            return self._version + max(0, min(by_count, step - self._trained))
