"""Access to the store for clients that write and read payloads themselves, on a real service."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError

from buffer_service.rpc.servicers.payloads import PayloadServicer
from buffer_service.settings import Settings
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.payloads.access import StoreAccess
from buffer_wire.payloads.reader import PayloadReader
from rollout_buffer.v1 import common_pb2, payloads_pb2
from tests.service.refusals import refused
from tests.store.driver import Run
from tests.support.rpc import Rpc, RunRpc, connect, failure
from tests.support.sentinels import free_port
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import store_server

Ask = Callable[[payloads_pb2.PayloadAccessRequest], payloads_pb2.PayloadAccess]


@pytest.fixture(params=["GetWriteAccess", "GetReadAccess"])
def ask(request: pytest.FixtureRequest, rpc: Rpc) -> Ask:
    method: Ask = getattr(rpc.payloads, request.param)
    return method


@contextlib.contextmanager
def closing(rpc: Rpc) -> Iterator[Rpc]:
    with contextlib.closing(rpc.channel):
        yield rpc


def request_of(run: RunRpc, **fields: Any) -> payloads_pb2.PayloadAccessRequest:
    return payloads_pb2.PayloadAccessRequest(run=run.ref, **{"client_id": "worker-1", **fields})


def test_there_is_no_access_to_a_run_that_does_not_exist(ask: Ask) -> None:
    unknown = payloads_pb2.PayloadAccessRequest(run=common_pb2.RunRef(run_id="nobodys"), client_id="worker-1")
    assert failure(lambda: ask(unknown)).reason == "unknown_run"


@pytest.mark.parametrize(
    ("field", "value"),
    [("client_id", ""), ("client_id", "x" * 129), ("client_id", "a\nb"), ("trouble", "x" * 513)],
)
def test_a_request_out_of_bounds_is_refused_by_the_fields_name(rpc: Rpc, ask: Ask, field: str, value: str) -> None:
    run = rpc.create()
    refused(run, lambda: ask(request_of(run, **{field: value})), "invalid_field", field=field)


def test_a_client_of_this_host_gets_in_and_its_trouble_is_kept_until_it_has_none(
    rpc: Rpc, ask: Ask, service: ServiceProcess
) -> None:
    run = rpc.create()
    access = ask(request_of(run))
    assert [at.unix_path for at in access.addresses] == [str(service.data_dir / "store" / "store.sock")]
    assert (access.direct_from_bytes, access.unpushed_ms, access.relayed_because) == (65_536, 600_000, "")
    assert access.valid_ms > 0
    client: Any = redis.Redis(
        unix_socket_path=access.addresses[0].unix_path, username=access.username, password=access.password
    )
    with contextlib.closing(client), pytest.raises(NoPermissionError):
        client.keys()
    assert not run.get().relaying
    ask(request_of(run, trouble="connection\nrefused"))
    (relaying,) = run.get().relaying
    assert (relaying.client_id, relaying.why) == ("worker-1", "connection refused")
    assert service.log.read_text().count(run.run_id) == 1
    for _ in range(2):
        ask(request_of(run, trouble="no answer in time"))
    (relaying,) = run.get().relaying
    assert relaying.why == "no answer in time"
    for _ in range(2):
        ask(request_of(run))
    assert not run.get().relaying
    relayed, other, again = [line for line in service.log.read_text().splitlines() if run.run_id in line]
    assert ("connection refused" in relayed, "no answer in time" in other) == (True, True)
    assert ("go directly again" in again, "why" in again) == (True, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_another_user_of_the_host_cannot_open_the_stores_socket_and_has_the_service_relay(rpc: Rpc) -> None:
    run = rpc.create()

    def ask(trouble: str) -> payloads_pb2.PayloadAccess:
        access: payloads_pb2.PayloadAccess = rpc.payloads.GetReadAccess(request_of(run, trouble=trouble))
        return access

    reader = PayloadReader(run.run_id, "worker-1", ask)
    with contextlib.closing(reader):
        os.seteuid(65_534)
        try:
            assert not reader.open()
        finally:
            os.seteuid(0)
        ask(reader.trouble)
        assert ["Permission denied" in client.why for client in run.get().relaying] == [True]


def test_a_service_without_direct_payloads_relays_by_its_own_will(tmp_path: Path) -> None:
    with running_service(tmp_path, direct_payloads=False) as service, closing(connect(service.address)) as rpc:
        run = rpc.create()
        access = rpc.payloads.GetReadAccess(request_of(run, trouble="anything"))
        assert "--no-direct-payloads" in StoreAccess.checked(access).relayed_because
        assert not access.addresses
        assert not run.get().relaying


class Elsewhere:
    """The context of a call from another host."""

    def peer(self) -> str:
        return "ipv4:192.0.2.7:40000"


async def test_an_old_trouble_does_not_hide_why_a_client_is_offered_nothing() -> None:
    with store_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10)
        run = Run(store)
        await run.create()
        unused: Any = None
        servicer = PayloadServicer(store, Settings().for_rpc(), parts=unused, blobs=unused, slots=unused)
        ref = common_pb2.RunRef(run_id=run.run_id)
        request = payloads_pb2.PayloadAccessRequest(run=ref, client_id="w", trouble="refused")
        access = await servicer.GetWriteAccess(request, cast("Any", Elsewhere()))
        assert "--payload-listen" in access.relayed_because
        assert [client.why for client in (await run.view()).relaying] == [access.relayed_because]
        await store.close()


def test_an_embedded_store_that_listens_is_entered_by_its_address(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with running_service(tmp_path, payload_listen=listen) as service, closing(connect(service.address)) as rpc:
        access = rpc.payloads.GetReadAccess(request_of(rpc.create()))
        assert [at.unix_path or f"{at.host}:{at.port}" for at in access.addresses] == [
            str(service.data_dir / "store" / "store.sock"),
            listen,
        ]
        at = access.addresses[1]
        client: Any = redis.Redis(at.host, at.port, username=access.username, password=access.password)
        with contextlib.closing(client), pytest.raises(NoPermissionError):
            client.keys()
        stranger: Any = redis.Redis(at.host, at.port)
        with contextlib.closing(stranger), pytest.raises(AuthenticationError):
            stranger.ping()
        assert json.loads((service.data_dir / "service.json").read_text())["store"].startswith("unix://:***@/")


def test_the_operators_users_stand_in_where_the_service_may_make_none(tmp_path: Path) -> None:
    with store_server() as store:
        client: Any = redis.Redis(unix_socket_path=str(store.socket))
        with contextlib.closing(client):
            client.execute_command("ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-acl")
        limited = store.url.replace("unix://", "unix://limited:pw@")
        with running_service(tmp_path / "a", store=limited) as service, closing(connect(service.address)) as rpc:
            run = rpc.create()
            access = rpc.payloads.GetWriteAccess(request_of(run))
            assert "RB_PAYLOAD_WRITER" in StoreAccess.checked(access).relayed_because
            assert [client.why for client in run.get().relaying] == [access.relayed_because]
            rpc.payloads.GetWriteAccess(request_of(run, trouble="refused"))
            rpc.payloads.GetWriteAccess(request_of(run))
            assert [client.why for client in run.get().relaying] == [access.relayed_because]
            assert service.log.read_text().count(run.run_id) == 1, "no news"
        named = ("env", "RB_PAYLOAD_WRITER=writer:one", "RB_PAYLOAD_READER=reader:two")
        service = ServiceProcess(tmp_path / "b", {"store": limited, "rpc_processes": 1}, within=named)
        service.start()
        with closing(connect(service.address)) as rpc:
            access = rpc.payloads.GetWriteAccess(request_of(rpc.create()))
            assert (access.username, access.password, access.relayed_because) == ("writer", "one", "")
            access = rpc.payloads.GetReadAccess(request_of(rpc.create()))
            assert (access.username, access.password) == ("reader", "two")
        assert service.stop() == 0
        assert "writer:***" in service.log.read_text()
