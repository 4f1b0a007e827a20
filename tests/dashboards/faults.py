"""Faults that dashboards show and alerts say only when something is wrong, provoked on the real service.

Each fault has a run of its own, so that the run that the dashboards show goes on undisturbed.
"""

import contextlib
import threading
from collections.abc import Iterator

import grpc

from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from rollout_buffer.v1 import common_pb2, runs_pb2, weights_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, make_group, make_task, streamed
from tests.support.store_server import StoreServer

REFUSED_EVERY_S = 0.5


def connected(address: str, token: str) -> Rpc:
    """A client with this token."""
    return Rpc(Connector(address, Access(token=token)).blocking())


def hold(rpc: Rpc) -> None:
    """A run that an operator pauses."""
    run = rpc.create(batch_groups=2)
    rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S)


def stand_still(rpc: Rpc) -> None:
    """A run with tasks, whose engines are quarantined and (a minute later) silent: it makes no step."""
    run = rpc.create(batch_groups=2)
    run.submit([make_task(f"t{i}") for i in range(4)])
    run.report("engine-0", weights_pb2.ENGINE_STATE_QUARANTINED, last_error="a load that failed", errors=1)
    run.report("engine-1", weights_pb2.ENGINE_STATE_QUARANTINED)


def stall(rpc: Rpc) -> None:
    """A run whose groups wait in a stage that nobody works for."""
    run = rpc.create(batch_groups=2, stages=["reference"])
    run.fill(2)


def lag(rpc: Rpc) -> None:
    """A run with work whose one engine has version 0, twelve behind, and that trains on what it made."""
    run = rpc.create(batch_groups=2)
    run.publish(11)
    run.fill(2)
    run.publish(12)
    run.pull(0)
    run.publish(13)
    run.submit([make_task("t")])
    run.report("engine-0", loaded=common_pb2.WeightVersion(term=1, version=0))


class Repeated(threading.Thread):
    """Events that go on: calls that are refused, leases that expire, tasks that fail, groups that are filtered or too
    stale, pulls that end without a batch. Alerts look at rates, so once is not enough.
    """

    def __init__(self, rpc: Rpc, stranger: Rpc) -> None:
        super().__init__(name="repeated faults", daemon=True)
        self.error: Exception | None = None
        self._stranger = stranger
        self._filtering = rpc.create(batch_groups=2, filter_equal_rewards=True)
        self._filtering.submit([make_task("t")])
        self._filtering.report("engine-0")
        self._gated = rpc.create(batch_groups=2, max_queued_groups=4, max_staleness=0)
        self._failing = rpc.create(batch_groups=2, max_attempts=1, lease_ttl_ms=1_000)
        self._over = threading.Event()
        self._micro_batch = 0

    def run(self) -> None:
        """See Thread."""
        try:
            while not self._over.wait(REFUSED_EVERY_S):
                self._micro_batch += 1
                self._once()
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def end(self) -> None:
        """Stop, and raise what went wrong."""
        self._over.set()
        self.join(60)
        if self.error is not None:
            raise self.error

    def _once(self) -> None:
        name = f"r{self._micro_batch}"
        refused = runs_pb2.ListRunsRequest()
        with contextlib.suppress(grpc.RpcError):
            self._stranger.runs.ListRuns(refused, timeout=TIMEOUT_S)
        self._filtering.push([make_group(f"{name}-{i}") for i in range(4)])
        # One version passes while it is queued, and none may.
        self._gated.push([make_group(name, version=common_pb2.WeightVersion(term=1, version=self._micro_batch - 1))])
        self._gated.publish(self._micro_batch)
        with contextlib.suppress(grpc.RpcError):
            self._gated.pull(0)
        # A lease that nobody extends: its one attempt is over with it.
        self._failing.submit([make_task(name)])
        self._failing.lease()


class BlockedPush:
    """A push that waits for room in a full queue."""

    def __init__(self, rpc: Rpc) -> None:
        self._run = rpc.create(batch_groups=2, overflow_action=runs_pb2.OVERFLOW_ACTION_BLOCK)
        self._run.fill(2)
        self._call = streamed(
            self._run.rpc.groups.PushGroups(self._run.bundles([[make_group("blocked")]]), timeout=10 * TIMEOUT_S)
        )

    def end(self) -> None:
        """Make room; returns when the push is acknowledged."""
        self._run.pull(0)
        assert len(list(self._call)) == 1


@contextlib.contextmanager
def full(store: StoreServer, limit_bytes: int) -> Iterator[None]:
    """The store refuses writes within, as if its memory were used up; `limit_bytes`: what it had."""
    store.configure("maxmemory", 1)
    try:
        yield
    finally:
        store.configure("maxmemory", limit_bytes)


def write(rpc: Rpc) -> None:
    """A call that a full store refuses."""
    with contextlib.suppress(grpc.RpcError):
        rpc.create(batch_groups=2)
