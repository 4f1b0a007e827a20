"""Bytes that are no message, to every method, and clients that go away: refusals like any other, and a quiet log."""

from collections.abc import Iterator

import grpc
import pytest

from buffer_service.rpc.server import SERVICE_NAMES
from buffer_service.security.roles import RULES
from buffer_wire.errors import InvalidField
from tests.support.rpc import connect, failure, streamed
from tests.support.service import ServiceProcess, running_service

CUT_OFF = b"\x0a\x05ab"
NO_WIRE_TYPE = b"\xff\xff\xff"
FOREIGN = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service whose log is this module's."""
    with running_service(tmp_path_factory.mktemp("malformed")) as service:
        yield service


@pytest.fixture
def log(service: ServiceProcess) -> Iterator[None]:
    """The test adds no traceback and no error to the log."""
    before = len(service.log.read_text())
    yield
    added = service.log.read_text()[before:]
    assert "Traceback" not in added
    assert "[error" not in added


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("method", [*RULES, *FOREIGN])
def test_what_is_no_message_is_an_invalid_field(service: ServiceProcess, method: str) -> None:
    with grpc.insecure_channel(service.address) as channel:
        for message in (CUT_OFF, NO_WIRE_TYPE):
            # A stream of one message each way is what every kind of method can be called as.
            call = channel.stream_stream(method, None, None)
            error = failure(lambda: list(call(iter([message]), timeout=20)))  # noqa: B023 - called at once
            assert isinstance(error, InvalidField)
            assert error.attributes["field"] == "message"


def test_the_log_counts_malformed_messages(service: ServiceProcess) -> None:
    before = len(service.log.read_text())
    with grpc.insecure_channel(service.address) as channel:
        for _ in range(200):
            failure(lambda: channel.unary_unary("/rollout_buffer.v1.RunService/ListRuns", None, None)(CUT_OFF))
    lines = [line for line in service.log.read_text()[before:].splitlines() if "ListRuns" in line]
    assert len(lines) <= 10, "lines are bounded"
    ended = service.metric("rollout_buffer_rpcs_total", method="ListRuns", code="INVALID_ARGUMENT")
    assert ended >= 200, "each is counted"


@pytest.mark.usefixtures("log")
def test_a_reader_that_goes_away_in_the_middle_is_no_error(service: ServiceProcess) -> None:
    # By probes gRPC lets a stream of a slow machine have megabytes on their way, which is all of a pull.
    rpc = connect(service.address, ("grpc.http2.bdp_probe", 0))
    run = rpc.create(batch_groups=24)
    run.fill(24, lengths=(20_000, 20_000))
    pulls = [streamed(rpc.batches.PullBatch(run.pull_request(0), timeout=60)) for _ in range(20)]
    for i, pull in enumerate(pulls):
        for _ in range(i % 4):
            next(pull)
    # The service is in the middle of each: what was not read does not fit into the connection.
    service.until_metric(len(pulls), "rollout_buffer_open_rpcs", method="PullBatch")
    for pull in pulls:
        pull.cancel()
    for deadline_ms in range(1, 21):
        pull = rpc.batches.PullBatch(run.pull_request(1, wait_ms=5_000), timeout=deadline_ms / 1000)
        with pytest.raises(grpc.RpcError) as caught:
            list(pull)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    service.until_metric(0, "rollout_buffer_open_rpcs")


def test_every_service_is_covered() -> None:
    assert {method.split("/")[1] for method in RULES} == set(SERVICE_NAMES)
