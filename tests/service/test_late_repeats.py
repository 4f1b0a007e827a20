"""Pushes without leases whose answer is lost, and whose step is trained and checkpointed before they come again."""

from collections.abc import Callable, Iterator
from typing import Any

from buffer_wire.status import ServiceUnreachable
from rollout_buffer.v1 import groups_pb2
from tests.support.rpc import Rpc, failure, make_group
from tests.support.service import ServiceProcess
from trainer_client.client.blocking import BufferClient
from trainer_client.integrations.miles.pushing import GroupPusher, Withdrawal

CLOSED = groups_pb2.PUSH_OUTCOME_CLOSED


class LosesAnswers:
    """The first answer is lost, after something has happened meanwhile."""

    def __init__(self, pusher: GroupPusher, meanwhile: Callable[[], object]) -> None:
        self.calls = 0
        self._push: Any = pusher._push
        self._meanwhile = meanwhile
        pusher._push = self  # type: ignore[assignment]

    def __call__(self, requests: Iterator[bytes], *, timeout: float) -> Any:
        call = self._push(requests, timeout=timeout)
        self.calls += 1
        if self.calls == 1:
            next(iter(call))
            self._meanwhile()
            raise ServiceUnreachable("UNAVAILABLE: connection reset", status="UNAVAILABLE")
        return call


def test_our_own_pushers_repeat_is_not_trained_again(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)

    def train() -> None:
        assert [item.group.header.task_id for item in run.pull(0)[1]] == ["a"]
        run.commit(0)
        run.checkpoint(0)

    with BufferClient(service.address) as client:
        pusher = GroupPusher(client, run.run_id)
        line = LosesAnswers(pusher, train)
        group = make_group("a")
        assert pusher.push(group.header, group.payload, Withdrawal()) == "closed"
        assert line.calls == 2
        pusher.close()
    # Nor is that of a pusher that does not say when it tried first.
    assert run.push_one(make_group("a")).outcome == CLOSED
    groups = run.get().groups
    assert (groups.accepted.groups, groups.trained.groups) == (1, 1)
    assert failure(lambda: run.pull(1)).reason == "batch_not_ready"
