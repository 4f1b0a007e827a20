"""Metrics of the rpc processes. Their values live in files of the data directory (prometheus_client's multiprocess
mode, switched on by the supervisor through the environment), which the supervisor's admin page adds up.

No label names a worker, a task or a sample.
"""

from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from buffer_service.domain import ops

_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RpcMetrics:
    """Counters of one rpc process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rpcs = Counter(
            "rollout_buffer_rpcs", "RPCs that ended, by method and status code.", ["method", "code"], registry=registry
        )
        self._latency = Histogram(
            "rollout_buffer_rpc_seconds",
            "Duration of RPCs; long polls and streams include what they wait.",
            ["method"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        received = Counter(
            "rollout_buffer_rpc_received_bytes",
            "Bytes of messages with groups that came in.",
            ["method"],
            registry=registry,
        )
        sent = Counter(
            "rollout_buffer_rpc_sent_bytes",
            "Bytes of messages with groups that went out.",
            ["method"],
            registry=registry,
        )
        pushed = Counter("rollout_buffer_pushed_groups", "Pushed groups by outcome.", ["outcome"], registry=registry)
        # Looking up a label costs more than counting.
        self._received = {method: received.labels(method) for method in ("PushGroups", "PushGroup")}
        self._sent = {method: sent.labels(method) for method in ("PullBatch",)}
        self._pushed = {kind: pushed.labels(kind.value) for kind in ops.PushKind}
        self._blocked = Gauge(
            "rollout_buffer_blocked_pushes",
            "Pushes that wait for room in a full queue.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._open = Gauge(
            "rollout_buffer_open_rpcs", "RPCs in progress.", ["method"], registry=registry, multiprocess_mode="livesum"
        )

    @contextmanager
    def in_progress(self, method: str) -> Iterator[None]:
        """Count an RPC while it lasts."""
        gauge = self._open.labels(method)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def ended(self, method: str, code: str, seconds: float) -> None:
        """An RPC ended."""
        self._rpcs.labels(method, code).inc()
        self._latency.labels(method).observe(seconds)

    def received(self, method: str, size: int) -> None:
        """A message with groups came in."""
        self._received[method].inc(size)

    def sent(self, method: str, size: int) -> None:
        """A message with groups goes out."""
        self._sent[method].inc(size)

    def pushed(self, outcomes: Sequence[ops.Pushed]) -> None:
        """A push was settled."""
        for kind, count in Counts(outcome.kind for outcome in outcomes).items():
            self._pushed[kind].inc(count)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count a push while it waits for room."""
        self._blocked.inc()
        try:
            yield
        finally:
            self._blocked.dec()
