"""Leases with large partial rollouts: their replies stay below the message limit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_buffer.v1 import tasks_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, connect, make_group, make_task
from tests.support.service import running_service

MIB = 1 << 20
TOKENS = 100_000
"""Tokens of one partial rollout: 9 bytes each."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Rpc]:
    """A client of a service whose messages are 1 MiB, and 2 MiB of framing."""
    with running_service(tmp_path, rpc_processes=1, max_message_bytes=MIB) as service:
        client = connect(service.address)
        yield client
        client.channel.close()


def test_large_partial_rollouts_are_leased_again_one_by_one(small: Rpc) -> None:
    run = small.create()
    names = [f"task-{number}" for number in range(4)]
    run.submit([make_task(name) for name in names])
    for lease in run.lease(4).leases:
        kept = make_group(lease.task.task_id, lengths=(TOKENS,))
        assert MIB // 2 < kept.ByteSize() < MIB
        back = tasks_pb2.LeaseReturn(
            lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED, partial_rollout=kept
        )
        request = tasks_pb2.ReturnLeasesRequest(
            run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, returns=[back]
        )
        small.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
    replies = [run.lease(4) for _ in names]
    assert [[lease.task.task_id for lease in reply.leases] for reply in replies] == [[name] for name in names]
    assert all(reply.leases[0].HasField("partial_rollout") for reply in replies)
    assert [reply.wait for reply in replies[:3]] == [tasks_pb2.LEASE_WAIT_UNSPECIFIED] * 3
