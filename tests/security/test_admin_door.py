"""The door of the admin page, and reflection and health beside it."""

import base64
import json
import socket
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from buffer_service.security.gate import BURST
from buffer_service.security.roles import Role
from tests.page.events import watching
from tests.security.contract import call
from tests.security.guarded import Guarded

TIMEOUT_S = 10.0
CREATE = "/rollout_buffer.v1.RunService/CreateRun"


def fetched(guarded: Guarded, path: str, authorization: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(guarded.service.admin + path)
    if authorization is not None:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module", autouse=True)
def runs(guarded: Guarded, tokens: dict[Role, str]) -> None:
    root = guarded.add("page-maker", Role.ADMIN, "*")
    with grpc.insecure_channel(guarded.service.address) as channel:
        for run in ("math-1", "secret-1"):
            assert call(channel, CREATE, root, run)[0] is not grpc.StatusCode.UNAUTHENTICATED


def test_probes_need_no_token(guarded: Guarded) -> None:
    assert fetched(guarded, "/livez")[0] == 200
    assert fetched(guarded, "/readyz")[0] == 200


def test_the_page_needs_none_and_holds_no_data(guarded: Guarded) -> None:
    """It asks for the token itself."""
    for path in ("/", "/page/page.js", "/page/page.css"):
        status, body = fetched(guarded, path)
        assert status == 200
        assert "math-1" not in body
    for path in ("/page/absent", "/page/..%2F..%2Fapi/runs", "/page/../api/runs", "/page/%2e%2e/api/runs"):
        assert fetched(guarded, path)[0] == 404, path


def test_a_browser_is_asked_for_a_password_and_the_page_is_not(guarded: Guarded) -> None:
    for accept, scheme in (
        ("text/html,*/*;q=0.8", "Basic"),
        ("application/json", "Bearer"),
        ("text/event-stream", "Bearer"),
    ):
        request = urllib.request.Request(f"{guarded.service.admin}/api", headers={"Accept": accept})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=TIMEOUT_S)
        with refused.value as error:
            assert error.headers["WWW-Authenticate"].partition(" ")[0] == scheme


@pytest.mark.parametrize(
    "path",
    [
        "/api",
        "/api/events?run=math-1",
        "/api/events?run=absent",
        "/api/events",
        "/metrics",
        "/api/runs",
        "/api/runs/math-1",
        "/api/runs/absent",
        "/api/runs/math-1/groups",
        "/api/runs/math-1/groups/x0/0",
        "/absent",
        "//",
        "/page",
    ],
)
def test_everything_else_does(guarded: Guarded, path: str) -> None:
    for authorization in (None, "Bearer garbage", "Basic ???", "Basic Zm9v", "Basic é", "Digest x"):
        assert fetched(guarded, path, authorization)[0] == 401, authorization


@pytest.mark.parametrize(
    ("path", "roles"),
    [
        ("/metrics", {Role.READER, Role.ADMIN}),
        ("/metrics%0A", {Role.READER, Role.ADMIN}),
        ("/api", {Role.READER, Role.TRAINER, Role.ADMIN}),
        ("/api/runs", {Role.READER, Role.TRAINER, Role.ADMIN}),
    ],
)
def test_roles_see_what_is_theirs(guarded: Guarded, tokens: dict[Role, str], path: str, roles: set[Role]) -> None:
    for role, token in tokens.items():
        status, body = fetched(guarded, path, f"Bearer {token}")
        assert status == (200 if role in roles else 403), (role, body)
        assert "secret-1" not in body


def test_other_runs_are_refused_whether_they_are_there_or_not(guarded: Guarded, tokens: dict[Role, str]) -> None:
    reader = f"Bearer {tokens[Role.READER]}"
    for run in ("secret-1", "secret-2"):
        for path in (
            f"/api/runs/{run}",
            f"/api/runs/{run}/groups",
            f"/api/runs/{run}/groups/x/0",
            f"/api/runs/%73{run[1:]}",
        ):
            status, body = fetched(guarded, path, reader)
            assert (status, json.loads(body)["reason"]) == (403, "permission_denied")
    assert fetched(guarded, "/api/runs/math-absent", reader)[0] == 404


def test_the_events_of_a_run_are_for_who_may_see_it(guarded: Guarded, tokens: dict[Role, str]) -> None:
    for role, token in tokens.items():
        authorization = {"Authorization": f"Bearer {token}"}
        if role is Role.WORKER:
            assert fetched(guarded, "/api/events?run=math-1", f"Bearer {token}")[0] == 403
            continue
        with watching(guarded.service.admin, "math-1", **authorization) as said:
            assert next(said).data["run"]["run_id"] == "math-1"
    for path in (
        "/api/events?run=secret-1",
        "/api/events?run=secret-2",
        "/api/events?run=math-1&run=secret-1",
        "/api/events?run=%73ecret-1",
    ):
        status, body = fetched(guarded, path, f"Bearer {tokens[Role.READER]}")
        assert (status, json.loads(body)["reason"]) == (403, "permission_denied"), path
    assert fetched(guarded, "/api/events?run=math-absent", f"Bearer {tokens[Role.READER]}")[0] == 404


def test_events_end_when_their_token_is_revoked(guarded: Guarded) -> None:
    token = guarded.add("leaver", Role.READER)
    with watching(guarded.service.admin, "math-1", Authorization=f"Bearer {token}") as said:
        next(said)
        guarded.revoke("leaver")
        *_, end = said
    assert (end.event, end.data["reason"]) == ("end", "unauthenticated")


def test_a_browser_shows_the_token_as_a_password(guarded: Guarded, tokens: dict[Role, str]) -> None:
    shown = base64.b64encode(f"anybody:{tokens[Role.READER]}".encode()).decode()
    assert fetched(guarded, "/api/runs", f"Basic {shown}")[0] == 200


def test_the_state_of_the_files_and_refusals_are_measured(guarded: Guarded, channel: grpc.Channel) -> None:
    root = guarded.add("scraper", Role.READER, "*")
    call(channel, CREATE, "garbage", "math-1")
    status, text = fetched(guarded, "/metrics", f"Bearer {root}")
    assert status == 200
    assert 'rollout_buffer_security_file_broken{file="tokens"} 0.0' in text
    assert 'rollout_buffer_refused_calls_total{reason="unauthenticated"}' in text
    content = guarded.tokens_file.read_text()
    guarded.tokens_file.write_text(content + "broken\n")
    try:
        # Anything that looks at the file at once will do.
        fetched(guarded, "/metrics", "Bearer rb.nobody.x")
        text = fetched(guarded, "/metrics", f"Bearer {root}")[1]
        assert 'rollout_buffer_security_file_broken{file="tokens"} 1.0' in text
    finally:
        guarded.tokens_file.write_text(content)


def test_checks_of_health_are_open_and_watches_and_reflection_are_for_admins(
    guarded: Guarded, channel: grpc.Channel, tokens: dict[Role, str]
) -> None:
    health_stub = health_pb2_grpc.HealthStub(channel)
    health = health_stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    for role in (None, *Role):
        metadata = () if role is None else (("authorization", f"Bearer {tokens[role]}"),)
        answers = stub.ServerReflectionInfo(iter([asked]), metadata=metadata, timeout=TIMEOUT_S)
        watch = health_stub.Watch(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=TIMEOUT_S)
        if role is Role.ADMIN:
            assert len(next(answers).list_services_response.service) > 5
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            continue
        denied = grpc.StatusCode.UNAUTHENTICATED if role is None else grpc.StatusCode.PERMISSION_DENIED
        for refused_stream in (answers, watch):
            with pytest.raises(grpc.RpcError) as refused:
                next(refused_stream)
            assert refused.value.code() is denied


def test_who_keeps_failing_is_told_less_and_good_tokens_still_pass(
    channel: grpc.Channel, tokens: dict[Role, str], guarded: Guarded
) -> None:
    said = [call(channel, CREATE, "garbage", "math-1")[1] for _ in range(BURST + 5)]
    assert "too many calls from this address were refused" in said[-1]
    assert call(channel, CREATE, tokens[Role.READER], "math-1")[0] is grpc.StatusCode.PERMISSION_DENIED
    log = guarded.service.log.read_text()
    assert "not authenticated" in log
    assert tokens[Role.READER].rpartition(".")[2] not in log


def test_a_token_that_is_not_ascii_is_refused_and_not_logged(guarded: Guarded) -> None:
    """Value in HTTP/2's own frames: gRPC's clients do not send such a value."""
    fields = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": CREATE.encode(),
        ":authority": b"localhost",
        "te": b"trailers",
        "content-type": b"application/grpc",
        "authorization": b"Bearer rb.not-ascii.\xff\xfe",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value for name, value in fields.items()
    )
    settings, headers, end_of_headers = 4, 1, 4
    host, _, port = guarded.service.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, 0, 0, b""))
        connection.sendall(frame(headers, end_of_headers, 1, block))
        with connection.makefile("rb") as answer:
            kind = settings
            while kind != headers:
                length, kind = int.from_bytes(answer.read(3), "big"), answer.read(1)[0]
                answer.read(5 + length)
    log = guarded.service.log.read_text()
    assert "rb.not-ascii" not in log
    assert "Invalid encoding" not in log


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """Make one of HTTP/2."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
