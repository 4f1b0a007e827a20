"""Settings: defaults, precedence, bounds, and what is never printed."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from buffer_service.app.assignment import Assignment
from buffer_service.observability.addresses import Address
from buffer_service.settings import Durability, LogFormat, Settings, redact_url


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("RB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_defaults_need_nothing(tmp_path: Path) -> None:
    settings = Settings()
    assert settings.listen == "127.0.0.1:50051"
    assert settings.data_dir == tmp_path / "rollout-buffer"
    assert settings.durability is Durability.PROCESS
    assert 1 <= settings.rpc_processes <= 4


def test_the_environment_sets_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RB_RPC_PROCESSES", "3")
    monkeypatch.setenv("RB_DURABILITY", "host")
    assert Settings().rpc_processes == 3
    assert Settings().durability is Durability.HOST
    assert Settings(rpc_processes=1).rpc_processes == 1


@pytest.mark.parametrize(
    "values",
    [
        {"rpc_processes": 0},
        {"durability": "everysec"},
        {"listen": "50051"},
        {"listen": "::1:50051"},
        {"listen": "127.0.0.1:70000"},
        {"max_message_bytes": 1},
        {"drain_grace_s": -1},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_what_is_out_of_bounds_or_unknown_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        Settings(**values)
    assert next(iter(values)) in str(error.value)


@pytest.mark.parametrize("name", ["listen", "admin"])
def test_an_open_door_has_to_be_asked_for(name: str) -> None:
    open_door: dict[str, Any] = {name: "0.0.0.0:50051"}
    with pytest.raises(ValidationError, match="insecure"):
        Settings(**open_door)
    assert Settings(**open_door, insecure=True).insecure
    for loopback in ("localhost:1", "127.0.0.2:1", "[::1]:1"):
        open_door[name] = loopback
        Settings(**open_door)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().rpc_processes = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:secret@host", "redis://:***@host"),
        ("unix:///tmp/store.sock", "unix:///tmp/store.sock"),
        ("redis://host:6379", "redis://host:6379"),
        (
            "redis+sentinel://u:secret@one:1,two:2/s?sentinel_password=other&sentinel_username=x",
            "redis+sentinel://u:***@one:1,two:2/s?sentinel_password=***&sentinel_username=x",
        ),
        ("redis://user:p@ss:w@rd@host:6379", "redis://user:***@host:6379"),
    ],
)
def test_passwords_are_never_shown(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert Settings(store=url).redacted()["store"] == shown


def test_passwords_of_named_users_are_never_shown() -> None:
    settings = Settings(store="redis://s", payload_writer="w:secret", payload_reader="r:sec:ret")
    shown = settings.redacted()
    assert (shown["payload_writer"], shown["payload_reader"]) == ("w:***", "r:***")
    assert "sec" not in repr(settings.for_rpc())


def test_addresses_are_written_as_they_are_read() -> None:
    for text in ("127.0.0.1:80", "[::1]:80", "localhost:0"):
        assert str(Address.parse(text)) == text


def test_an_rpc_process_is_told_the_settings_that_the_supervisor_has(tmp_path: Path) -> None:
    settings = Settings(
        tokens_file=tmp_path / "tokens",
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        max_streams=7,
        drain_grace_s=1.5,
        log_format=LogFormat.JSON,
    )
    told = Assignment.from_json(Assignment(1, "127.0.0.1:2", "redis://:secret@host", settings.for_rpc()).to_json())
    assert (told.supervisor_pid, told.address, told.store) == (1, "127.0.0.1:2", "redis://:secret@host")
    for each in fields(told.settings):
        value = getattr(told.settings, each.name)
        assert value == getattr(settings, each.name)
        assert isinstance(value, Path) == isinstance(getattr(settings, each.name), Path)


def test_an_rpc_process_starts_without_pydantic() -> None:
    script = "import sys, buffer_service.app.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not {"pydantic", "starlette", "uvicorn"} & set(done.stdout.split())


def test_a_payload_store_names_its_own_addresses_and_takes_the_operators_users() -> None:
    cluster = "redis+cluster://u:secret@one:1,two:2"
    with pytest.raises(ValidationError, match="a cluster names its own"):
        Settings(payload_store=cluster, payload_address="host:1")
    with pytest.raises(ValidationError, match="a cluster names its own"):
        Settings(payload_store=cluster, payload_listen="127.0.0.1:7000")
    with pytest.raises(ValidationError, match="a cluster names its own"):
        Settings(store=cluster, payload_address="host:1")
    with pytest.raises(ValidationError, match="leave out payload_store"):
        Settings(store=cluster, payload_store=cluster)
    settings = Settings(payload_store=cluster, payload_writer="w:secret", payload_reader="r:secret")
    assert settings.redacted()["payload_store"] == "redis+cluster://u:***@one:1,two:2"
