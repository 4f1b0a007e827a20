"""Tests of what a client sends, where it takes it from, and to whom it does not send it."""

from pathlib import Path

import grpc
import pytest

from buffer_wire.connection import access as access_module
from buffer_wire.connection.access import Access, TokenSource, stays_here
from buffer_wire.connection.channels import Connector
from buffer_wire.connection.retry import Retry
from buffer_wire.errors import InvalidField, RolloutBufferError, Unauthenticated
from trainer_client.client.driver import ClientOptions


def test_what_is_unset_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RB_TOKEN", "of-the-environment")
    monkeypatch.setenv("RB_TLS_CA", "ca.pem")
    assert Access().effective().token == "of-the-environment"
    assert ClientOptions().effective().tls_ca == "ca.pem"
    given = ClientOptions(token_file=tmp_path / "t", timeout_s=1.0).effective()
    assert (given.token, given.token_file, given.timeout_s) == ("", tmp_path / "t", 1.0)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(ClientOptions(token="secret"))


@pytest.mark.parametrize(
    ("access", "field"),
    [
        (Access(token="a", token_file="b"), "token_file"),
        (Access(token="a b"), "token"),
        (Access(tls_ca="ca", tls_cert="c"), "tls_key"),
        (Access(tls_cert="c", tls_key="k"), "tls_ca"),
        (Access(tls_server_name="n"), "tls_ca"),
    ],
)
def test_what_contradicts_itself_is_refused(access: Access, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        access.effective()
    assert refused.value.attributes["field"] == field


@pytest.mark.parametrize(
    "target", ["127.0.0.1", "http://127.0.0.1:50051", "host:", ":50051", "host:port", "a b:1", "::1:50051", "[::1]", ""]
)
def test_what_is_no_address_is_refused_at_once(target: str) -> None:
    with pytest.raises(InvalidField, match="host:port") as refused:
        Connector(target, Access())
    assert refused.value.attributes["field"] == "address"


@pytest.mark.parametrize(
    "target", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/s", "dns:///localhost:1", "ipv4:127.0.0.2:1"]
)
def test_this_machine_is_told_the_token_in_plain_text(target: str) -> None:
    assert stays_here(target)
    Connector(target, Access(token="t")).blocking().close()


@pytest.mark.parametrize(
    "target", ["buffer:1", "10.0.0.1:1", "localhost.example:1", "dns:///buffer:1", "ipv6:[fe80::1]:1"]
)
def test_another_machine_is_not(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidField, match="plain text"):
        Connector(target, Access(token="t"))
    Connector(target, Access(token="t", insecure=True)).blocking().close()
    Connector(target, Access()).blocking().close()
    monkeypatch.setenv("RB_INSECURE", "1")
    Connector(target, Access(token="t")).blocking().close()


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read again when a token is refused, and not because time has passed."""
    monkeypatch.setattr(access_module, "POLL_S", float("inf"))


@pytest.mark.usefixtures("no_looks")
def test_a_token_file_is_read_again_when_the_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    tokens = TokenSource(Access(token_file=file))
    sent: list[str] = []

    def call() -> str:
        sent.append(tokens.current)
        if sent[-1] != "second":
            raise Unauthenticated("no")
        return "done"

    file.write_text("second\n")
    assert Retry(deadline_s=5, waiting_on="x", tokens=tokens).blocking(call) == "done"
    assert sent == ["first", "second"]


def test_a_token_that_stays_refused_is_tried_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise Unauthenticated("no")

    with pytest.raises(Unauthenticated):
        Retry(deadline_s=5, waiting_on="x", tokens=TokenSource(Access(token_file=file))).blocking(call)
    assert len(calls) == 1


def test_a_token_file_that_goes_away_leaves_its_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    tokens = TokenSource(Access(token_file=file))
    file.unlink()
    assert not tokens.renew("first")
    assert tokens.current == "first"
    file.write_text("")
    assert not tokens.renew("first")
    for content in ("", "two words", "é"):
        file.write_text(content)
        with pytest.raises(InvalidField):
            TokenSource(Access(token_file=file))


def test_a_channel_without_a_token_is_grpcs_own() -> None:
    with Connector("localhost:1", Access()).blocking() as channel:
        assert isinstance(channel, grpc.Channel)


def test_refusals_are_errors_of_the_tree() -> None:
    assert issubclass(Unauthenticated, RolloutBufferError)
    assert not Unauthenticated("x").retryable
