"""Clients of a service that asks for tokens: who gets what, and tokens that are replaced while they run."""

import asyncio
import time
from itertools import count
from pathlib import Path

import grpc
import pytest

from buffer_service.security.roles import Role
from buffer_wire.codec import join_push
from buffer_wire.connection import access as access_module
from buffer_wire.connection.access import Access
from buffer_wire.connection.retry import rpc_error
from buffer_wire.errors import InvalidField, PermissionDenied, Unauthenticated
from rollout_buffer.v1 import common_pb2, groups_pb2, weights_pb2, weights_pb2_grpc
from rollout_workers.service.client import ServiceClient
from rollout_workers.versions import Version
from rollout_workers.weights.watcher import WeightWatcher
from tests.security.contract import call
from tests.security.guarded import Guarded
from trainer_client.client.aio import AsyncBufferClient
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import ClientOptions
from trainer_client.integrations.miles.pushing import GroupPusher, Withdrawal

GET_RUN = "/rollout_buffer.v1.RunService/GetRun"


class Rotation:
    """A token file of a client, whose token can be replaced."""

    def __init__(self, guarded: Guarded, path: Path, name: str, role: Role) -> None:
        self._guarded, self._name, self._role = guarded, name, role
        self._generation = 0
        self.path = path
        self.path.write_text(guarded.add(f"{name}-0", role) + "\n")

    def replace(self) -> None:
        """A new token into the client's file, then the old one out of the service's."""
        self._generation += 1
        old = self.path.read_text().strip()
        self.path.write_text(self._guarded.add(f"{self._name}-{self._generation}", self._role) + "\n")
        self._guarded.revoke(f"{self._name}-{self._generation - 1}")
        until_refused(self._guarded, old)

    def revoke(self) -> None:
        """Take the client's token out of the service's file; it is refused from now on."""
        self._guarded.revoke(f"{self._name}-{self._generation}")
        until_refused(self._guarded, self.path.read_text().strip())


def until_refused(guarded: Guarded, token: str) -> None:
    """Return when the service refuses a token that was revoked, which may be good for a second more."""
    deadline = time.monotonic() + 10
    with grpc.insecure_channel(guarded.service.address) as channel:
        while call(channel, GET_RUN, token, "math-absent")[0] is not grpc.StatusCode.UNAUTHENTICATED:
            assert time.monotonic() < deadline, "the service has not refused the revoked token"
            # It looks at its file once a second.
            time.sleep(0.05)


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients read their token file again when a token is refused, and not because time has passed."""
    monkeypatch.setattr(access_module, "POLL_S", float("inf"))


@pytest.mark.usefixtures("no_looks")
def test_a_trainer_goes_on_with_a_new_token(guarded: Guarded, tmp_path: Path) -> None:
    rotation = Rotation(guarded, tmp_path / "token", "rotating", Role.TRAINER)
    with BufferClient(guarded.service.address, ClientOptions(token_file=rotation.path, timeout_s=20)) as client:
        client.create_run("math-rotation")
        for _ in range(2):
            rotation.replace()
            assert client.run("math-rotation").run_id == "math-rotation"
        rotation.revoke()
        with pytest.raises(Unauthenticated):
            client.run("math-rotation")


@pytest.mark.usefixtures("no_looks")
def test_a_trainer_that_pushes_goes_on_with_a_new_token(guarded: Guarded, tmp_path: Path) -> None:
    rotation = Rotation(guarded, tmp_path / "token", "miles", Role.TRAINER)
    with BufferClient(guarded.service.address, ClientOptions(token_file=rotation.path, timeout_s=20)) as client:
        client.create_run("math-miles")
        pusher = GroupPusher(client, "math-miles")
        rotation.replace()
        # Before the pusher the client, whose token is then another than that of the pusher's channel.
        assert client.run("math-miles").run_id == "math-miles"
        try:
            # What the service says of a group without samples.
            with pytest.raises(InvalidField):
                pusher.push(groups_pb2.GroupHeader(), b"", Withdrawal())
        finally:
            pusher.close()


@pytest.mark.usefixtures("no_looks")
async def test_an_asyncio_client_goes_on_with_a_new_token(guarded: Guarded, tmp_path: Path) -> None:
    rotation = Rotation(guarded, tmp_path / "token", "aio", Role.TRAINER)
    options = ClientOptions(token_file=rotation.path, timeout_s=20)
    async with AsyncBufferClient(guarded.service.address, options) as client:
        await client.create_run("math-aio")
        await asyncio.to_thread(rotation.replace)
        assert (await client.run("math-aio")).run_id == "math-aio"


def test_what_a_token_does_not_allow_is_raised_at_once(guarded: Guarded) -> None:
    token = guarded.add("limited", Role.TRAINER, "math-limited")
    with BufferClient(guarded.service.address, ClientOptions(token=token, timeout_s=60)) as client:
        client.create_run("math-limited")
        started = time.monotonic()
        with pytest.raises(PermissionDenied, match="'limited' \\(trainer\\) may not call DeleteRun"):
            client.delete_run("math-limited")
        with pytest.raises(PermissionDenied, match="run 'code'"):
            client.create_run("code")
        assert time.monotonic() - started < 10
        assert client.runs() == ("math-limited",)


def test_a_token_of_the_environment_is_enough(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RB_TOKEN", guarded.add("of-environment", Role.READER, "none"))
    with BufferClient(guarded.service.address) as client:
        assert client.runs() == ()


@pytest.mark.usefixtures("no_looks")
async def test_a_worker_goes_on_watching_with_a_new_token(guarded: Guarded, tmp_path: Path) -> None:
    trainer = ClientOptions(token=guarded.add("publisher", Role.TRAINER), timeout_s=20)
    rotation = Rotation(guarded, tmp_path / "token", "watching", Role.WORKER)
    access = Access(token_file=rotation.path)
    service = ServiceClient(guarded.service.address, "math-watch", instance_id="i", timeout_s=20, access=access)
    async with AsyncBufferClient(guarded.service.address, trainer) as client, asyncio.timeout(60):
        await client.create_run("math-watch")
        term = (await client.resume("math-watch")).term
        watcher = WeightWatcher(service)
        watching = asyncio.create_task(watcher.run())
        await watcher.changes.until(lambda: watcher.latest is not None)
        await asyncio.to_thread(rotation.replace)
        # The next version ends the stream of the old token.
        await client.publish("math-watch", term=term, version=1)
        await watcher.changes.until(lambda: watcher.latest is not None and watcher.latest.version == Version(term, 1))
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await service.close()


def test_a_stream_whose_token_is_revoked_ends(guarded: Guarded, channel: grpc.Channel) -> None:
    trainer = ClientOptions(token=guarded.add("other-publisher", Role.TRAINER), timeout_s=20)
    metadata = (("authorization", f"Bearer {guarded.add('brief', Role.WORKER)}"),)
    ref = common_pb2.RunRef(run_id="math-brief")
    push = channel.stream_stream("/rollout_buffer.v1.GroupService/PushGroups", None, None)
    with BufferClient(guarded.service.address, trainer) as client:
        client.create_run("math-brief")
        watch = weights_pb2_grpc.WeightServiceStub(channel).WatchWeights(
            weights_pb2.WatchWeightsRequest(run=ref), metadata=metadata, timeout=30
        )
        assert next(iter(watch)).published.version == 0

        # Each with a group that is refused, which is an answer too.
        bundles = (join_push(ref, sequence, [[b""]]) for sequence in count(1))
        pushed = push(bundles, metadata=metadata, timeout=30)
        assert groups_pb2.PushGroupsResponse.FromString(next(iter(pushed))).sequence == 1
        guarded.revoke("brief")
        with pytest.raises(grpc.RpcError) as refused:
            for _ in pushed:
                pass
        assert isinstance(rpc_error(refused.value), Unauthenticated)
        term = client.resume("math-brief").term
        client.publish("math-brief", term=term, version=1)
        with pytest.raises(grpc.RpcError) as ended:
            for _ in watch:
                pass
        assert isinstance(rpc_error(ended.value), Unauthenticated)
