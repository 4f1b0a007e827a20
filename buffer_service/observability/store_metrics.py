"""Metrics of the store's calls: their cost to an rpc process, and failures; in the same memory as metrics.py's."""

from prometheus_client import CollectorRegistry, Counter

from buffer_service.observability.tally import Observations, SummedHistogram, Tally
from buffer_wire import errors

_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)

STORE_ERRORS = tuple(
    error.reason
    for error in (
        errors.StoreUnavailable,
        errors.StoreOutOfMemory,
        errors.StoreOutOfDisk,
        errors.StoreUnsuitable,
        errors.StoreRolledBack,
        errors.NotReplicated,
        errors.StoreFault,
    )
)
"""Reasons for which calls fail; store_fault: what none of the others stands for."""


class StoreMetrics:
    """Calls of one rpc process. Only a timer writes them: there is one call of the store or more for every RPC."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = SummedHistogram(
            "rollout_buffer_store_call_seconds",
            "Duration of the process's calls of the store, from sending to the reply, by script or kind of command.",
            ["operation"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        failed = Counter(
            "rollout_buffer_store_errors", "Calls of the store that failed, by reason.", ["kind"], registry=registry
        )
        # From 0, or the first one would not be seen as an increase.
        self._failed = {kind: failed.labels(kind) for kind in STORE_ERRORS}
        self._tally = Tally()
        self._by_operation: dict[str, Observations] = {}

    def took(self, operation: str, seconds: float) -> None:
        """A call ended, in whatever way."""
        observations = self._by_operation.get(operation)
        if observations is None:
            observations = self._by_operation[operation] = Observations(self._seconds.labels(operation))
        self._tally.observe(observations, seconds)

    def failed(self, kind: str) -> None:
        """A call failed; `kind` is the error's reason."""
        self._failed.get(kind, self._failed[errors.StoreFault.reason]).inc()

    def flush(self) -> None:
        """Write what is not written yet, before the process ends."""
        self._tally.flush()
