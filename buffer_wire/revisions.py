"""The highest revision a process has seen of each run: sent along with every request, so that a store that has lost
acknowledged writes is noticed by whoever knew of them.

Invariant: what is seen of a run never falls while the run exists. Safe to share between threads.
"""

from threading import Lock

from rollout_buffer.v1 import common_pb2


class Revisions:
    """One for each process and service; pass every reply's `revision` to `note`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen: dict[str, int] = {}

    def note(self, run_id: str, revision: int) -> None:
        """Take a reply's revision into account."""
        with self._lock:
            if revision > self._seen.get(run_id, 0):
                self._seen[run_id] = revision

    def forget(self, run_id: str) -> None:
        """The run does not exist any more: another one of its name counts from the beginning."""
        with self._lock:
            self._seen.pop(run_id, None)

    def seen(self, run_id: str) -> int:
        """Highest revision noted for the run; 0 for none."""
        return self._seen.get(run_id, 0)

    def ref(self, run_id: str) -> common_pb2.RunRef:
        """The RunRef of a request."""
        return common_pb2.RunRef(run_id=run_id, seen_revision=self.seen(run_id))
