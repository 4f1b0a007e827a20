"""The highest revision that a process has seen of each run, with its proof.

It is sent along with every request. So a store that has lost acknowledged writes is noticed by whoever knew of them.

Invariant: what is seen of a run never falls while the run exists. Safe to share between threads.
"""

from threading import Lock

from buffer_wire.errors import RolloutBufferError, UnknownRun, UnprovenRevision
from buffer_wire.revision import NO_REVISION, Revision
from rollout_buffer.v1 import common_pb2


class Revisions:
    """Revisions that a process has seen from one service, by run.

    Pass the revision of every reply to `note`, and every error to `met`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen: dict[str, Revision] = {}

    def note(self, run_id: str, revision: Revision) -> None:
        """Take a reply's revision into account; one without a proof acknowledges nothing."""
        with self._lock:
            if revision.proof and revision > self.seen(run_id):
                self._seen[run_id] = revision

    def met(self, run_id: str, error: RolloutBufferError) -> bool:
        """Take an error into account. True when the request can be repeated at once, without what it claimed."""
        if isinstance(error, UnknownRun | UnprovenRevision):
            # The run that was seen does not exist any more: another one of its name has its own revisions.
            return self.forget(run_id) and isinstance(error, UnprovenRevision)
        return False

    def forget(self, run_id: str) -> bool:
        """The run does not exist any more: another one of its name counts from the beginning. True when it was seen."""
        with self._lock:
            return self._seen.pop(run_id, None) is not None

    def seen(self, run_id: str) -> Revision:
        """Highest revision noted for the run; 0 for none."""
        return self._seen.get(run_id, NO_REVISION)

    def ref(self, run_id: str) -> common_pb2.RunRef:
        """Make the RunRef that a request carries: the run's id, and its highest revision noted here, with the proof."""
        seen = self.seen(run_id)
        return common_pb2.RunRef(run_id=run_id, seen_revision=seen, seen_proof=seen.proof)
