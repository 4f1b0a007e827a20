"""Configuration: settings of the environment, command lines of what serves, files of tokens and certificates.

The first byte says what the rest is, modulo 4: lines NAME=VALUE of an environment, words of a command line, a file of
hashed tokens, or any file of an access. Nothing is started: what a command would run is handed
its checked options and ends.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import typer.main
from pydantic import ValidationError

from buffer_cli.main import app
from buffer_cli.relay import start as relay_start
from buffer_cli.serve import start as serve_start
from buffer_cli.serve.config import explained
from buffer_cli.worker import start as worker_start
from buffer_service.observability import logs
from buffer_service.rpc_settings import RpcSettings
from buffer_service.security.tokens import TokenSet, TokensRefused
from buffer_service.settings import Settings
from buffer_wire.connection.access import WEIGHTS, Access, TokenSource
from buffer_wire.connection.tls_files import TlsFiles
from buffer_wire.errors import InvalidField
from buffer_wire.weights.door import WeightsDoor
from rollout_workers.options import WorkerOptions
from rollout_workers.relay.options import RelayOptions
from rollout_workers.relay.server import Relay
from rollout_workers.weights.server import host_and_port
from tests.fuzz.guided.promises import refused_by_name

ENVIRONMENT, COMMAND, TOKENS, FILE = b"\0", b"\1", b"\2", b"\3"
SECRET = "hunter2"
"""Password that no output may show, whatever stands around it."""
PATHS = (
    *("tokens_file", "tls_cert", "tls_key", "tls_client_ca", "admin_client_ca", "data_dir", "store_ca", "store_binary"),
)
"""Settings that name files, which may be called like a password."""
COMMANDS = ("serve", "worker", "relay", "config")
_PLACE = Path(tempfile.mkdtemp(prefix="fuzz-configuration-"))
_COMMAND = typer.main.get_command(app)
_ENTRY = {"id": "a", "role": "worker", "runs": ["r-*"], "sha256": "0" * 64, "expires": "2030-01-31T12:00:00Z"}
SEEDS = (
    ENVIRONMENT
    + b"RB_LISTEN=0.0.0.0:1\nRB_INSECURE=1\nRB_RPC_PROCESSES=2\nRB_CONNECTION_AGE_S=0.5\nRB_DURABILITY=host",
    ENVIRONMENT + b"RB_STORE=redis+sentinel://u:hunter2@h:1,h:2/s?password=hunter2\nRB_PAYLOAD_ADDRESS=[::1]:2",
    ENVIRONMENT
    + b"RB_STORE=rediss://:hunter2@h:1\nRB_STORE_CA=/x\nRB_PAYLOAD_WRITER=u:hunter2\nRB_PAYLOAD_READER=v:hunter2",
    ENVIRONMENT + b"RB_PAYLOAD_LISTEN=127.0.0.1:0\nRB_PAYLOAD_ADDRESS=h:1\nRB_LOG_LEVEL=debug\nRB_MAX_STREAMS=1",
    COMMAND + b"worker\n--run=r\n--reward=m:f\n--engine=http://h:1\n--weights-serve=127.0.0.1:0\n--address=h:1",
    COMMAND + b"worker\n--run=r\n--agent=m:f\n--agent-listen=127.0.0.1:0\n--simulate\n--slots=3\n--tokens-per-s=1",
    COMMAND + b"worker\n--run=r\n--reward=m:f\n--launch=/m\n--engines=2\n--device=cpu\n--environment-limit=a=3",
    COMMAND + b"relay\n--upstream=http://h:1\n--listen=127.0.0.1:0\n--max-gb=1\n--patience-s=1",
    COMMAND + b"serve\n--listen=127.0.0.1:0\n--durability=memory\n--rpc-processes=1",
    COMMAND + b"config\npolicy\n--preset=areal(4)\n--set\nbatch_groups=3",
    TOKENS + (json.dumps(_ENTRY) + "\n\n" + json.dumps({**_ENTRY, "id": "b"})).encode(),
    FILE + b"rb.a.0123456789\n",
    FILE + b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
)


def one(data: bytes) -> None:
    """Settings are refused by name, or are such that what they are for can begin; secrets are not shown."""
    kind, content = (data[:1] or b"\0")[0] % 4, data[1:]
    text = content.decode("utf-8", "surrogateescape").replace("\0", "")
    if kind == ENVIRONMENT[0]:
        lines = (line.partition("=") for line in text.split("\n"))
        with mock.patch.dict(os.environ, {name: value for name, _, value in lines if name.startswith("RB_")}):
            _settings()
    elif kind == COMMAND[0]:
        _command(text.split("\n"))
    elif kind == TOKENS[0]:
        with contextlib.suppress(TokensRefused):
            for entry in TokenSet.parse(text).entries:
                assert TokenSet.parse(entry.to_line()).entries == (entry,)
                entry.expired(0.0)
    else:
        _file(content)


def _settings() -> None:
    try:
        settings = Settings()
    except ValidationError as error:
        said = explained(error)
        assert said
        assert SECRET not in said, said
        return
    shown = json.dumps({name: value for name, value in settings.redacted().items() if name not in PATHS})
    assert f":{SECRET}" not in shown, shown
    assert f"password={SECRET}" not in shown, shown
    for_rpc = settings.for_rpc()
    assert RpcSettings.from_values(json.loads(json.dumps(for_rpc.to_values(), allow_nan=False))) == for_rpc


def _command(words: list[str]) -> None:
    words = words if words[0] in COMMANDS else ["worker", *words]
    said = io.StringIO()
    status: str | int | None = None
    with (
        mock.patch.object(worker_start, "run_worker", _begun_worker),
        mock.patch.object(relay_start, "run_relay", _begun_relay),
        mock.patch.object(serve_start, "serve", _begun_service),
        mock.patch.object(logs, "configure"),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            _COMMAND.main(words, "rollout-buffer")
        except SystemExit as end:
            status = end.code
    assert status in (None, 0, 1, 2), status
    if status:
        assert re.search("error: |Error", said.getvalue()), said.getvalue()


def _begun_worker(options: WorkerOptions) -> int:
    if options.weights_serve:
        _can_bind(options.weights_serve)
    if options.agent is not None:
        _can_bind(options.agent.listen)
    return 0


def _begun_relay(options: RelayOptions) -> int:
    _can_bind(options.listen)
    assert options.max_bytes >= 1
    with contextlib.suppress(InvalidField):
        Relay(options)
    return 0


async def _begun_service(settings: Settings) -> None:
    json.dumps(settings.redacted(), allow_nan=False)


def _can_bind(address: str) -> None:
    assert 0 <= host_and_port(address)[1] <= 65_535, address


def _file(content: bytes) -> None:
    path = _PLACE / "file"
    path.write_bytes(content)
    for make in (
        lambda: TokenSource(Access(token_file=path)),
        lambda: TlsFiles(Access(tls_ca=path)),
        lambda: TlsFiles(Access(tls_ca=path, tls_cert=path, tls_key=path)),
        lambda: WeightsDoor(Access(token_file=path).effective(WEIGHTS), tls_cert=path, tls_key=path),
    ):
        try:
            make()
        except InvalidField as error:
            refused_by_name(error)
