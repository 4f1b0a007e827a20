"""A service with everything on: mutual TLS, TLS of the admin page, tokens; as its users meet it."""

import json
import shutil
import ssl
import stat
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from buffer_service.security.roles import Role
from buffer_wire.errors import RolloutBufferError
from tests.security.certificates import Authority
from tests.security.guarded import add_token
from tests.support.commands import command
from tests.support.service import ServiceProcess, running_service
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import ClientOptions


@dataclass(frozen=True)
class Closed:
    """The service, and what a client needs."""

    service: ServiceProcess
    folder: Path
    authority: Authority

    @property
    def access(self) -> dict[str, str]:
        """Settings as environment variables."""
        return {
            "RB_TLS_CA": str(self.folder / "ours.crt"),
            "RB_TLS_CLIENT_CERT": str(self.folder / "client.crt"),
            "RB_TLS_CLIENT_KEY": str(self.folder / "client.key"),
            "RB_TOKEN_FILE": str(self.folder / "trainer.token"),
            "RB_ADDRESS": self.service.address,
        }


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    authority = Authority(folder, "ours")
    server = authority.issue("server")
    authority.issue("client")
    tokens = folder / "tokens.jsonl"
    (folder / "trainer.token").write_text(add_token(tokens, "trainer", Role.TRAINER, "*"))
    settings = {
        "tokens_file": tokens,
        "tls_cert": server.cert,
        "tls_key": server.key,
        "tls_client_ca": authority.cert,
        # No --insecure: with tokens and TLS it may be reached from everywhere.
        "admin": "0.0.0.0:0",
    }
    with running_service(folder, **settings) as service:
        yield Closed(service, folder, authority)


def test_a_trainer_gets_in_and_nobody_without_a_certificate(closed: Closed) -> None:
    whole = ClientOptions(
        token_file=closed.folder / "trainer.token",
        tls_ca=closed.folder / "ours.crt",
        tls_cert=closed.folder / "client.crt",
        tls_key=closed.folder / "client.key",
        timeout_s=20,
    )
    with BufferClient(closed.service.address, whole) as client:
        assert client.create_run("math").run_id == "math"
        # Streams too.
        with pytest.raises(RolloutBufferError, match="not ready"):
            client.pull("math", term=client.resume("math").term, step=0, timeout_s=0.2)
    without = ClientOptions(token_file=whole.token_file, tls_ca=whole.tls_ca, timeout_s=0.5, attempt_timeout_s=5)
    with BufferClient(closed.service.address, without) as client:
        with pytest.raises(RolloutBufferError) as refused:
            client.runs()
        assert refused.value.reason == "service_unreachable"


def test_commands_get_in_by_environment_or_by_options(closed: Closed) -> None:
    by_environment = command("run", "create", "cli-1", "--json", **closed.access)
    assert by_environment.returncode == 0, by_environment.stderr
    given = {name: value for name, value in closed.access.items() if name != "RB_TOKEN_FILE"}
    refused = command("run", "list", **given)
    assert (refused.returncode, "not authenticated" in refused.stderr) == (1, True)
    by_option = command("status", "--run", "cli-1", "--json", "--token-file", closed.access["RB_TOKEN_FILE"], **given)
    assert by_option.returncode == 0, by_option.stderr
    assert json.loads(by_option.stdout)["run_id"] == "cli-1"
    exposed = command("run", "list", "--address", "buffer.example:1", "--token-file", closed.access["RB_TOKEN_FILE"])
    assert (exposed.returncode, "plain text" in exposed.stderr) == (1, True)
    deleted = command("run", "delete", "cli-1", "--yes", **closed.access)
    assert (deleted.returncode, "may not call DeleteRun" in deleted.stderr) == (1, True)


def test_the_admin_page_is_encrypted_and_takes_a_new_certificate(closed: Closed) -> None:
    url = f"https://localhost:{closed.service.admin.rpartition(':')[2]}"

    def fetched(authority: Path) -> int:
        trusting = ssl.create_default_context(cafile=str(authority))
        with urllib.request.urlopen(f"{url}/readyz", timeout=10, context=trusting) as answer:
            return int(answer.status)

    assert fetched(closed.authority.cert) == 200
    new = Authority(closed.folder, "new")
    renewed = new.issue("renewed")
    shutil.copy(renewed.cert, closed.folder / "server.crt")
    shutil.copy(renewed.key, closed.folder / "server.key")
    deadline = time.monotonic() + 10
    while True:
        try:
            assert fetched(new.cert) == 200
            break
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLCertVerificationError) or time.monotonic() > deadline:
                raise
    whole = ClientOptions(
        token_file=closed.folder / "trainer.token",
        tls_ca=new.cert,
        tls_cert=closed.folder / "client.crt",
        tls_key=closed.folder / "client.key",
        timeout_s=20,
    )
    with BufferClient(closed.service.address, whole) as client:
        client.runs()


def test_secrets_are_in_no_log(closed: Closed) -> None:
    log = closed.service.log.read_text()
    assert "tokens='asked for'" in log
    assert "tls=mutual" in log
    assert (closed.folder / "trainer.token").read_text().rpartition(".")[2] not in log


def test_tokens_are_made_listed_and_revoked(tmp_path: Path) -> None:
    file, secret = tmp_path / "tokens.jsonl", tmp_path / "worker.token"
    around = {"RB_TOKENS_FILE": str(file)}
    made = command(
        "token", "create", "--role", "worker", "--run", "math-*", "--id", "w1", "--to", str(secret), **around
    )
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert stat.S_IMODE(secret.stat().st_mode) == stat.S_IMODE(file.stat().st_mode) == 0o600
    printed = command("token", "create", "--role", "reader", "--run", "*", "--days", "1", **around)
    assert printed.stdout.startswith("rb.")
    listed = json.loads(command("token", "list", "--json", **around).stdout)
    assert [(one["role"], one["runs"], one["expires"] is None) for one in listed] == [
        ("worker", ["math-*"], True),
        ("reader", ["*"], False),
    ]
    assert secret.read_text().strip() not in file.read_text() + command("token", "list", **around).stdout
    again = command("token", "create", "--role", "worker", "--run", "a", "--to", str(secret), **around)
    assert (again.returncode, "cannot be written" in again.stderr) == (1, True)
    assert len(file.read_text().splitlines()) == 2
    assert command("token", "revoke", "w1", **around).returncode == 0
    assert command("token", "revoke", "w1", **around).returncode == 1
    assert "w1" not in file.read_text()
    assert command("token", "create", "--role", "root", "--run", "a", **around).returncode == 2
    assert command("token", "create", "--role", "worker", "--run", "a*b", **around).returncode == 1
