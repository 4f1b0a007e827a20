"""Metrics of the rpc processes. Their values live in memory that the supervisor shares (shared_values.py), whose admin
page adds them up.

No label names a worker, a task or a sample.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from buffer_service.domain import ops
from buffer_service.observability.tally import Tally
from buffer_wire.errors import PermissionDenied, Unauthenticated

_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_WAIT_BUCKETS_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Pushes wait as long as their workers let them."""

DIRECTIONS = ("in", "out")
"""Directions of messages on their way through a process."""

OF_RESULTS = (ops.PushKind.RECORDED, ops.PushKind.EVALUATIONS_FULL)
"""Outcomes that only results of evaluations have."""

_RESULT_OUTCOMES = {
    ops.PushKind.RECORDED: "accepted",
    ops.PushKind.DUPLICATE: "duplicate",
    ops.PushKind.CLOSED: "closed",
}
_RETURN_OUTCOMES = {
    ops.ReturnOutcome.PENDING: "pending",
    ops.ReturnOutcome.FAILED: "failed",
    ops.ReturnOutcome.LOST: "closed",
}
EVALUATION_OUTCOMES = ("accepted", "duplicate", "closed", "pending", "failed")
"""Outcomes for evaluations' tasks when a lease of them ends."""

FOUND = ("gone", "damaged")
"""Findings of pulls about payloads that are lost."""

REFUSALS = (Unauthenticated.reason, PermissionDenied.reason)
"""Reasons for which callers are refused."""


class RpcMetrics:
    """Counters of one rpc process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        waits = partial(Histogram, buckets=_WAIT_BUCKETS_S, registry=registry)
        self._rpcs = counter("rollout_buffer_rpcs", "RPCs that ended, by method and status code.", ["method", "code"])
        self._latency = Histogram(
            "rollout_buffer_rpc_seconds",
            "Duration of RPCs; long polls and streams include what they wait.",
            ["method"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        received = counter(
            "rollout_buffer_rpc_received_bytes", "Bytes of messages with groups that came in.", ["method"]
        )
        sent = counter("rollout_buffer_rpc_sent_bytes", "Bytes of messages with groups that went out.", ["method"])
        direct = counter(
            "rollout_buffer_direct_bytes",
            "Bytes of groups that passed the service by: their clients wrote them to the store, or were told where to "
            "read them there. Groups that came by WritePayload count here too when they are pushed.",
            ["method"],
        )
        lost = counter(
            "rollout_buffer_lost_payloads",
            "Payloads that a pull found gone from the store, or damaged there; a group of the present trainer is "
            "settled as lost.",
            ["found"],
        )
        pushed = counter("rollout_buffer_pushed_groups", "Pushed groups by outcome.", ["outcome"])
        evaluated = counter(
            "rollout_buffer_evaluation_leases_ended",
            "Leases of evaluations' tasks that ended by a word of their worker, by what became of the task.",
            ["outcome"],
        )
        refused = counter(
            "rollout_buffer_refused_calls",
            "Calls that were refused for who made them: unauthenticated or permission_denied.",
            ["reason"],
        )
        aged = counter(
            "rollout_buffer_aged_streams",
            "Streams that ended in good order at their age (connection_age_s), for their clients to connect anew.",
            ["method"],
        )
        # From 0, or the first one would not be seen as an increase.
        self._refused = {reason: refused.labels(reason) for reason in REFUSALS}
        self._aged = {method: aged.labels(method) for method in ("PushGroups", "WatchWeights")}
        self._tally = Tally()
        # Looking up a label costs more than counting.
        self._received = {
            method: received.labels(method) for method in ("PushGroups", "PushGroup", "WritePayload", "WriteBlob")
        }
        self._sent = {method: sent.labels(method) for method in ("PullBatch", "ReadPayload", "ReadBlob")}
        self._direct = {method: direct.labels(method) for method in ("PushGroups", "PushGroup", "PullBatch")}
        self._lost = {found: lost.labels(found) for found in FOUND}
        self._pushed = {kind: pushed.labels(kind.value) for kind in ops.PushKind if kind not in OF_RESULTS}
        self._evaluated = {outcome: evaluated.labels(outcome) for outcome in EVALUATION_OUTCOMES}
        self._blocked = gauge("rollout_buffer_blocked_pushes", "Pushes that wait for room in a full queue.")
        self._held = gauge(
            "rollout_buffer_held_bytes",
            "Bytes of messages that are on their way through the rpc processes: in, until the store has them, or out, "
            "until gRPC has sent them.",
            ["direction"],
            multiprocess_mode="livesum",
        )
        self._push_wait = waits(
            "rollout_buffer_push_wait_seconds",
            "How long pushes waited for room in a full queue, whatever ended the wait; those that found room at once "
            "are not in it.",
        )
        self._pull_wait = waits(
            "rollout_buffer_pull_wait_seconds",
            "How long pulls waited for their batch, those that ended without one included.",
        )
        self._waiting_pulls = gauge("rollout_buffer_waiting_pulls", "Pulls that wait for their batch.", ["run"])
        self._open = gauge("rollout_buffer_open_rpcs", "RPCs in progress.", ["method"])

    @contextmanager
    def in_progress(self, method: str) -> Iterator[None]:
        """Count an RPC while it lasts."""
        with self._open.labels(method).track_inprogress():
            yield

    def ended(self, method: str, code: str, seconds: float) -> None:
        """Count an RPC that ended, and its duration."""
        self._tally.flush()
        self._rpcs.labels(method, code).inc()
        self._latency.labels(method).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a call that was refused because of its caller."""
        self._refused[reason].inc()

    def aged(self, method: str) -> None:
        """Count a stream that ended at its age."""
        self._aged[method].inc()

    def received(self, method: str, size: int) -> None:
        """A message with groups came in."""
        self._tally.add(self._received[method], size)

    def sent(self, method: str, size: int) -> None:
        """A message with groups goes out."""
        self._tally.add(self._sent[method], size)

    def direct(self, method: str, size: int) -> None:
        """Groups of this size, of which the message has only keys, came in or go out."""
        self._tally.add(self._direct[method], size)

    def lost(self, *, gone: int, damaged: int) -> None:
        """A pull found payloads gone, and others damaged."""
        self._lost["gone"].inc(gone)
        self._lost["damaged"].inc(damaged)

    def pushed(self, outcomes: Sequence[ops.Pushed]) -> None:
        """A push was settled."""
        kinds = [outcome.kind for outcome in outcomes if outcome.sink is ops.TaskSink.QUEUE]
        for kind, counter in self._pushed.items():
            if count := kinds.count(kind):
                self._tally.add(counter, count)
        for outcome in outcomes:
            if outcome.sink is ops.TaskSink.EVALUATIONS and outcome.kind in _RESULT_OUTCOMES:
                self._tally.add(self._evaluated[_RESULT_OUTCOMES[outcome.kind]], 1)

    def returned(self, lease_ids: Sequence[str], outcomes: Sequence[ops.ReturnOutcome]) -> None:
        """Leases were handed back; those of evaluations' tasks are counted."""
        for lease_id, outcome in zip(lease_ids, outcomes, strict=True):
            if ops.sink_of(lease_id) is ops.TaskSink.EVALUATIONS:
                self._tally.add(self._evaluated[_RETURN_OUTCOMES[outcome]], 1)

    def holds(self, direction: str) -> Callable[[int], None]:
        """Return the function to call with the bytes of messages that are held, whenever that number changes."""
        return self._held.labels(direction).set

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count a push while it waits for room, and how long it does."""
        with self._blocked.track_inprogress(), self._push_wait.time():
            yield

    @contextmanager
    def pulling(self, run_id: str) -> Iterator[Callable[[], None]]:
        """Count how long a pull waits for its batch.

        Yields a function to call when the pull has to wait. Before, it is not known that there is such a run, and any
        name would become a label.
        """
        started, waiting = time.monotonic(), False

        def wait() -> None:
            nonlocal waiting
            if not waiting:
                waiting = True
                self._waiting_pulls.labels(run_id).inc()

        try:
            yield wait
        finally:
            self._pull_wait.observe(time.monotonic() - started)
            if waiting:
                self._waiting_pulls.labels(run_id).dec()
