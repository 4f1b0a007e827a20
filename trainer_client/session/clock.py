"""Which version will train on a step that is pulled ahead of its turn.

    train_version(s) = published version + publishes still to come before step s is trained

with one publish after every `batches_per_publish` steps counted from the last one, as the service estimates it,
but never more publishes than steps that are still to be trained before s: a step pulled at the moment it is
trained is trained by what is published. Weights that are offered again under a new version are no publish after
a step: the version rises by one, and those that are still to come stay as many.
"""

from threading import Lock


class TrainClock:
    """A trainer's view of steps and versions; shared by the training thread and the one that prefetches.

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
        """The published version, as far as this process knows."""
        return self._version

    @property
    def handed_out(self) -> int:
        """Every step below this one has been handed to the training loop."""
        return self._handed_out

    def hand_out(self, step: int) -> None:
        """`step` goes to the training loop, or the last round of it does."""
        with self._lock:
            self._handed_out = step + 1

    def train(self) -> None:
        """What was handed out is trained."""
        with self._lock:
            self._trained = self._handed_out

    def published(self, version: int) -> None:
        """`version`, trained on every step handed out so far, is published."""
        with self._lock:
            self._version = version
            self._trained = self._published_steps = self._handed_out

    def correct(self, version: int) -> None:
        """`version` is published: somebody else did it, or older weights got a new number. A lower one is old news."""
        with self._lock:
            self._version = max(self._version, version)

    def pace(self, batches_per_publish: int) -> None:
        """From now on there is one publish after so many steps."""
        with self._lock:
            self._batches_per_publish = batches_per_publish

    def train_version(self, step: int) -> int:
        """The version that will train on `step`, one that is not trained yet."""
        with self._lock:
            by_count = (step - self._published_steps) // self._batches_per_publish
            return self._version + max(0, min(by_count, step - self._trained))
