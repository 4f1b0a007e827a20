"""Many workers of one token at one process: their watches, opened at once, and their push streams."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from buffer_service.security.roles import Role
from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2, runs_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.security.guarded import add_token
from tests.support.service import running_service

METHOD = "/rollout_buffer.v1.GroupService/PushGroups"
CONNECTIONS = 20
WATCHES = 2_000
"""gRPC's own bound of pending RPCs is 1,000."""
PUSHERS = 300


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connector]:
    folder = tmp_path_factory.mktemp("fleet")
    token = add_token(folder / "tokens", "fleet", Role.ADMIN, "*")
    with running_service(folder, tokens_file=folder / "tokens") as service:
        yield Connector(service.address, Access(token=token))


async def test_watches_that_come_at_once_are_all_served(connector: Connector) -> None:
    request = weights_pb2.WatchWeightsRequest(run=common_pb2.RunRef(run_id="watched"))
    async with AsyncExitStack() as open_channels:
        channels = [await open_channels.enter_async_context(connector.asyncio()) for _ in range(CONNECTIONS)]
        runs = runs_pb2_grpc.RunServiceStub(channels[0])
        await runs.CreateRun(runs_pb2.CreateRunRequest(run_id="watched"))
        stubs = [weights_pb2_grpc.WeightServiceStub(channel) for channel in channels]
        watches = [stubs[i % CONNECTIONS].WatchWeights(request, timeout=60) for i in range(WATCHES)]
        first = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        assert [each for each in first if not isinstance(each, weights_pb2.WatchWeightsResponse)] == []


async def test_push_streams_stay_open_beside_each_other(connector: Connector) -> None:
    async with AsyncExitStack() as open_channels:
        channels = [await open_channels.enter_async_context(connector.asyncio()) for _ in range(CONNECTIONS)]
        runs = runs_pb2_grpc.RunServiceStub(channels[0])
        await runs.CreateRun(runs_pb2.CreateRunRequest(run_id="pushed"))
        bundle = groups_pb2.PushGroupsRequest(
            run=common_pb2.RunRef(run_id="pushed"), sequence=1, groups=[groups_pb2.Group()]
        ).SerializeToString()
        streams = []
        for i in range(PUSHERS):
            begin = channels[i % CONNECTIONS].stream_stream(METHOD, None, groups_pb2.PushGroupsResponse.FromString)
            stream = begin(None, timeout=60)
            await stream.write(bundle)
            answer = await stream.read()
            assert isinstance(answer, groups_pb2.PushGroupsResponse)
            assert answer.acks[0].outcome == groups_pb2.PUSH_OUTCOME_INVALID, "an answer all the same"
            streams.append(stream)
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
