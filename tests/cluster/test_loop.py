"""A training loop whose payloads go directly to and from a cluster, while a shard fails over and slots move.

The index has a replica and each shard two, so that with `wait_replicas` 1 nothing that was acknowledged may be lost.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.sentinels import Pair, pair
from tests.support.service import ServiceProcess, running_service
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, endless, seen_once
from trainer_client import BufferClient, ClientOptions, Policy

pytestmark = pytest.mark.timeout(150)

TOKENS = 2_500
"""Tokens of a sample; four of them take 90 KB."""
BATCH_BYTES = 4 * 4 * TOKENS * 9
LARGE = (
    "--simulate", "--tokens-per-s", "20000", "--length-median", str(TOKENS), "--length-sigma", "0",
    "--groups-per-engine", "4", "--lease-wait-s", "1",
)  # fmt: skip
POLICY = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block", wait_replicas=1, wait_timeout_ms=500)
RUN = "loop"


@pytest.fixture(scope="module")
def cluster() -> Iterator[StoreCluster]:
    with store_cluster(replicas=2) as running:
        yield running


@pytest.fixture(scope="module")
def index() -> Iterator[Pair]:
    with pair() as running:
        yield running


@pytest.fixture
def service(cluster: StoreCluster, index: Pair, tmp_path: Path) -> Iterator[ServiceProcess]:
    # What the service remembers of payloads would hide what became of them on the cluster.
    stores = {"store": index.primary.url, "payload_store": cluster.url, "recent_bytes": 0}
    with running_service(tmp_path / "service", **stores) as running:
        yield running


class Direct:
    """Bytes that have passed the service by since it was made, in pushes and in pulls."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._before = [self._of(method) for method in ("PushGroups", "PullBatch")]

    def _of(self, method: str) -> float:
        return self._service.metric("rollout_buffer_direct_bytes_total", method=method)

    def both(self, at_least: int) -> bool:
        """True when so many have passed in each direction."""
        now = [self._of(method) for method in ("PushGroups", "PullBatch")]
        return all(after - before >= at_least for after, before in zip(now, self._before, strict=True))


def test_a_loop_goes_on_over_a_failover_and_a_move_of_slots_and_loses_and_repeats_nothing(
    service: ServiceProcess, cluster: StoreCluster, tmp_path: Path
) -> None:
    seen: set[str] = set()
    with (
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        worker_process(service.address, RUN, tmp_path, *LARGE) as worker,
        client.session(RUN, policy=POLICY, tasks=endless(TOKENS), options=OPTIONS) as session,
    ):

        def train_until(met: Callable[[], bool]) -> None:
            while not met():
                for batch in itertools.islice(session, 2):
                    seen_once(seen, [group.task_id for group in batch.groups])
                    assert all(sample.tokens == TOKENS + sample.prompt_len for sample in batch.samples)

        def relaying() -> float:
            return service.metric("rollout_buffer_relaying_clients", run=RUN)

        shards: set[int] = set()

        def met_all() -> bool:
            shards.update(shard for shard, keys in enumerate(cluster.keys(f"rb:p:{RUN}:*")) if keys)
            return len(shards) == len(cluster.shards)

        direct = Direct(service)
        train_until(lambda: met_all() and direct.both(8 * BATCH_BYTES))

        first, last, _ = next(at for at in cluster.slots() if cluster.shard_of_slot(at[0]) == 0)
        moving = threading.Thread(target=cluster.migrate, args=(first, (first + last) // 2, 2))
        moving.start()
        train_until(lambda: not moving.is_alive())
        direct = Direct(service)
        train_until(lambda: direct.both(8 * BATCH_BYTES) and not relaying())

        cluster.kill(1)
        promoting = threading.Thread(target=cluster.until_promoted, args=(1,))
        promoting.start()
        train_until(lambda: not promoting.is_alive())
        direct = Direct(service)
        train_until(lambda: direct.both(8 * BATCH_BYTES) and not relaying())
        assert worker.stop() == 0
        run = client.run(RUN)
    assert run.ledger.balanced
    assert (run.ledger.groups.lost.groups, run.ledger.tasks.failed, run.paused) == (0, 0, "")
    assert "payloads relayed by the service: shard " in worker.said()
    assert "moves payloads directly again" in worker.said()
