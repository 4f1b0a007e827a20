"""Tests of who may do what, tried on a real service: every RPC × every role × right, wrong, missing,
expired, garbage.
"""

from pathlib import Path

import grpc
import pytest

from buffer_service.security.roles import RULES, Role, RunAt
from buffer_service.security.tokens import new_token
from rollout_buffer.keda import externalscaler_pb2, externalscaler_pb2_grpc
from tests.security.contract import METHODS, PATHS, call
from tests.security.guarded import Guarded
from tests.support.rpc import streamed

REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
RIGHT_RUNS = ("math-1", "exact")
WRONG_RUNS = ("other", "math", "exactly", "")


def test_every_rpc_has_a_rule_and_every_rule_an_rpc() -> None:
    assert set(RULES) == set(METHODS)


@pytest.mark.parametrize("path", PATHS)
def test_rules_find_the_run_where_the_request_has_it(path: str) -> None:
    fields = METHODS[path].input_type.fields_by_name
    by_reference, by_field = "run" in fields, "run_id" in fields
    expected = {
        RunAt.REF: (True, False),
        RunAt.BYTES: (True, False),
        RunAt.FIELD: (False, True),
        RunAt.NOWHERE: (False, False),
    }
    assert (by_reference, by_field) == expected[RULES[path].run_at]


@pytest.mark.parametrize("path", PATHS)
def test_exactly_the_roles_of_the_table_get_in_with_their_runs(
    path: str, channel: grpc.Channel, tokens: dict[Role, str]
) -> None:
    rule = RULES[path]
    for role, token in tokens.items():
        for run in RIGHT_RUNS:
            code, details = call(channel, path, token, run)
            assert (code not in REFUSED) == (role in rule.roles), (role, run, code, details)
        for run in WRONG_RUNS if rule.run_at is not RunAt.NOWHERE else ():
            code, details = call(channel, path, token, run)
            assert code is grpc.StatusCode.PERMISSION_DENIED, (role, run, code, details)


@pytest.mark.parametrize("path", PATHS)
def test_without_a_good_token_nobody_gets_in(path: str, channel: grpc.Channel, expired: dict[Role, str]) -> None:
    bad = [None, "", "garbage", "rb.of-admin.", new_token("of-admin"), new_token("nobody"), *expired.values()]
    for token in bad:
        code, details = call(channel, path, token, "math-1")
        assert code is grpc.StatusCode.UNAUTHENTICATED, (token, code, details)


def test_a_stream_is_checked_with_every_message(channel: grpc.Channel, tokens: dict[Role, str]) -> None:
    path = "/rollout_buffer.v1.GroupService/PushGroups"
    call(channel, "/rollout_buffer.v1.RunService/CreateRun", tokens[Role.ADMIN], "math-1")
    code, details = call(channel, path, tokens[Role.WORKER], "other", "math-1")
    assert code is grpc.StatusCode.PERMISSION_DENIED, details


def test_a_refusal_does_not_say_whether_there_is_such_a_run(
    channel: grpc.Channel, guarded: Guarded, tokens: dict[Role, str]
) -> None:
    root = guarded.add("maker", Role.ADMIN, "*")
    assert call(channel, "/rollout_buffer.v1.RunService/CreateRun", root, "private")[0] is not None
    answers = {
        call(channel, path, tokens[role], run)[1].replace(run, "RUN")
        for run in ("private", "absent")
        for role in (Role.READER,)
        for path in ("/rollout_buffer.v1.RunService/GetRun",)
    }
    assert len(answers) == 1


def test_an_unknown_method_and_a_refused_one_do_not_differ_without_a_token(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/rollout_buffer.v1.RunService/DropAll", None, None)(b"", timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_page_of_roles_says_what_the_table_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for path, rule in RULES.items():
        _, service, method = path.rsplit("/", 2)
        cells = " | ".join("yes" if role in rule.roles else "–" for role in Role)
        assert f"| `{service.rpartition('.')[2]}.{method}` | {cells} |" in page


def test_scaler_finds_its_token_in_the_triggers_metadata(channel: grpc.Channel, tokens: dict[Role, str]) -> None:
    stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)

    def code(**metadata: str) -> grpc.StatusCode:
        try:
            stub.IsActive(externalscaler_pb2.ScaledObjectRef(scalerMetadata=metadata), timeout=20)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    for token in tokens.values():
        assert code(run="math-1", tokenFromEnv=token) is grpc.StatusCode.OK
        assert code(run="other", tokenFromEnv=token) is grpc.StatusCode.PERMISSION_DENIED
    for bad in ("", "garbage", new_token("nobody")):
        assert code(run="math-1", tokenFromEnv=bad) is grpc.StatusCode.UNAUTHENTICATED
    assert code(run="math-1") is grpc.StatusCode.UNAUTHENTICATED


def test_stream_of_the_scaler_ends_when_its_token_is_revoked(guarded: Guarded, channel: grpc.Channel) -> None:
    token = guarded.add("scaling", Role.WORKER)
    asked = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"run": "math-1", "tokenFromEnv": token})
    said = streamed(externalscaler_pb2_grpc.ExternalScalerStub(channel).StreamIsActive(asked, timeout=20))
    assert next(said).result is False
    guarded.revoke("scaling")
    with pytest.raises(grpc.RpcError) as ended:
        next(said)
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
