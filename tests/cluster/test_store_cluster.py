"""The cluster of the tests itself: formed in time, fails over, moves slots, and leaves nothing behind."""

import time

import pytest
import redis

from tests.support.processes import alive
from tests.support.store_cluster import SLOTS, store_cluster

pytestmark = pytest.mark.timeout(60)


def test_a_cluster_forms_in_five_seconds_fails_over_and_leaves_nothing_behind() -> None:
    began = time.monotonic()
    with store_cluster() as cluster:
        formed_s = time.monotonic() - began
        print(f"formed in {formed_s:.2f} s")
        keys = {f"k{number}": cluster.shard_of(f"k{number}") for number in range(24)}
        for key, shard in keys.items():
            assert cluster.primary(shard).do("SET", key, "v") == b"OK"
        assert cluster.keys() == [{key for key, at in keys.items() if at == shard} for shard in range(3)]
        assert all(cluster.keys())
        assert all(cluster.primary(shard).do("WAIT", 1, 5_000) == 1 for shard in range(3))

        killed = cluster.kill(1)
        began = time.monotonic()
        promoted = cluster.until_promoted(1)
        print(f"promoted after {time.monotonic() - began:.2f} s")
        assert promoted is not killed
        assert cluster.keys()[1] == {key for key, shard in keys.items() if shard == 1}
        cluster.restart(killed)
        assert cluster.replicas(1) == [killed]

        pids = [node.process.pid for node in cluster.nodes if node.process]
        folders = [node.folder for node in cluster.nodes]
        cluster.freeze(killed)
    assert formed_s < 5
    assert len(pids) == 6
    assert not any(alive(pid) for pid in pids)
    assert not any(folder.exists() for folder in folders)


def test_slots_move_to_another_shard_with_their_keys() -> None:
    with store_cluster(replicas=0) as cluster:
        key = next(key for key in (f"k{number}" for number in range(99)) if cluster.shard_of(key) == 0)
        cluster.primary(0).do("SET", key, "v")
        cluster.migrate(0, SLOTS // 3 - 1, to=2)
        assert cluster.keys() == [set(), set(), {key}]
        with pytest.raises(redis.ResponseError, match=f":{cluster.primary(2).port}"):
            cluster.primary(0).do("GET", key)
