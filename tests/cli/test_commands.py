"""`rollout-buffer` as a user meets it."""

import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import metadata
from typing import Any

import pytest
import typer

from buffer_cli.main import app
from buffer_cli.options import ServiceOptions
from buffer_cli.serve import commands as serve_commands
from buffer_cli.worker import commands as worker_commands
from buffer_cli.worker.start import to_options
from buffer_service.settings import Settings
from buffer_wire.connection.access import Access
from buffer_wire.errors import InvalidField
from rollout_workers.engine.options import LaunchOptions, SimulatedOptions
from rollout_workers.options import AgentOptions, WorkerOptions
from tests.support.commands import command
from tests.support.rpc import connect, make_task
from tests.support.service import ServiceProcess

# ── help and configuration ───────────────────────────────────────────────────


def test_it_says_which_version_it_is() -> None:
    assert command("--version").stdout == f"{metadata.version('rollout-buffer')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("serve",),
        ("worker",),
        ("status",),
        ("config",),
        ("config", "policy"),
        ("run",),
        *(("run", name) for name in ("list", "show", "create", "policy", "pause", "drain", "continue", "delete")),
    ],
)
def test_every_command_explains_itself(arguments: tuple[str, ...]) -> None:
    shown = command(*arguments, "--help")
    assert shown.returncode == 0
    assert "Usage:" in shown.stdout


def test_serve_has_an_option_for_every_setting_that_is_no_password_and_no_other() -> None:
    # Command lines are seen by everybody on the machine.
    secrets = {"payload_writer", "payload_reader"}
    assert set(inspect.signature(serve_commands.serve).parameters) == set(Settings.model_fields) - secrets


def test_worker_has_an_option_for_every_option_of_a_worker() -> None:
    options = set(inspect.signature(worker_commands.worker).parameters)
    plain = {field.name for field in fields(WorkerOptions)} - {
        "launch", "simulated", "access", "weights_access",
    }  # fmt: skip
    # A token is no option: command lines are seen by everybody on the machine.
    access = {field.name for field in fields(Access)} - {"token", "insecure"}
    launch = {field.name for field in fields(LaunchOptions)} - {"model_path", "engines", "extra_flags"}
    simulated = {field.name for field in fields(SimulatedOptions)} - {"engines"}
    agent = {f"agent_{field.name}" for field in fields(AgentOptions)} - {"agent_function"}
    weights = {"weights_token_file", "weights_tls_ca"}
    engines = launch | simulated | {"launch", "simulate", "engines", "engine_flag"}
    assert plain | access | agent | weights | engines == options


def test_config_prints_the_effective_settings_without_secrets() -> None:
    shown = command("config", RB_STORE="redis://user:secret@host:6379", RB_RPC_PROCESSES="3")
    assert shown.returncode == 0
    values = json.loads(shown.stdout)
    assert values["rpc_processes"] == 3
    assert values["store"] == "redis://user:***@host:6379"
    assert set(values) == set(Settings.model_fields)
    assert "secret" not in shown.stdout + shown.stderr


def test_config_policy_prints_the_default_policy() -> None:
    values = json.loads(command("config", "policy").stdout)
    assert values["batch_groups"] == values["max_queued_groups"] == 32
    assert values["overflow_action"] == "drop_oldest"
    assert values["max_staleness"] is None
    assert values["reserve_queue_space"] is False
    assert values["order"] == "fifo"


def test_config_policy_prints_what_a_preset_makes_of_it() -> None:
    shown = command("config", "policy", "--preset", "areal(3)", "--set", "batch_groups=8")
    values = json.loads(shown.stdout)
    assert (values["preset"], values["max_queued_groups"], values["max_staleness"]) == ("areal(3)", 32, 3)
    refused = command("config", "policy", "--preset", "areal")
    assert refused.returncode == 1
    assert "areal(staleness 0 to" in refused.stderr
    mistyped = command("config", "policy", "--set", "batch=8")
    assert mistyped.returncode == 2
    assert "--set batch" in mistyped.stderr
    assert "Traceback" not in refused.stderr + mistyped.stderr


def test_a_setting_that_is_refused_is_named_with_its_flag_and_variable() -> None:
    for shown in (command("serve", "--rpc-processes", "0"), command("config", RB_RPC_PROCESSES="0")):
        assert shown.returncode == 2
        assert "rpc_processes (--rpc-processes, RB_RPC_PROCESSES)" in shown.stderr
        assert "Traceback" not in shown.stderr
    open_door = command("serve", "--listen", "0.0.0.0:0")
    assert open_door.returncode == 2
    assert "--insecure" in open_door.stderr


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (("--help",), {"grpc", "pydantic", "redis", "numpy", "starlette", "rollout_lab", "rollout_workers"}),
        (("config",), {"grpc", "redis", "numpy", "starlette", "rollout_workers"}),
        (("config", "policy"), {"grpc", "redis", "starlette", "rollout_workers"}),
        (("status", "--help"), {"grpc", "redis", "starlette", "rollout_workers"}),
        (("run", "create", "--help"), {"grpc", "redis", "starlette", "rollout_workers"}),
        (("serve", "--rpc-processes", "0"), {"grpc", "numpy", "rollout_lab", "rollout_workers"}),
        (("worker", "--run", "math"), {"redis", "starlette", "aiohttp.web", "rollout_lab"}),
        (
            ("plan", "--tailness", "1.4"),
            {"grpc", "redis", "starlette", "structlog", "rollout_workers", "trainer_client"},
        ),
        (
            ("inspect", "tasks", "--run", "math", "--address", "127.0.0.1:1", "--timeout-s", "0.1"),
            {"numpy", "redis"},
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: tuple[str, ...], unwanted: set[str]) -> None:
    script = (
        "import sys\nfrom buffer_cli.main import app\n"
        f"try:\n    app({list(arguments)!r})\nexcept SystemExit:\n    pass\n"
        "print('modules', *sorted(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    modules = set(done.stdout.splitlines()[-1].split()[1:])
    assert "typer" in modules
    assert not modules & unwanted


def commands_of(app: typer.Typer) -> Iterator[Callable[..., None]]:
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands_of(group.typer_instance)
    yield from (each.callback for each in app.registered_commands if each.callback is not None)


@pytest.mark.parametrize("command", [*commands_of(app)], ids=lambda command: f"{command.__module__}:{command.__name__}")
def test_what_a_command_runs_takes_its_options_and_no_other(command: Any) -> None:
    target = inspect.signature(pkgutil.resolve_name(command.runs))
    target.bind(**dict.fromkeys(inspect.signature(command.__wrapped__).parameters))


# ── status ───────────────────────────────────────────────────────────────────


def test_status_shows_where_a_run_stands(service: ServiceProcess) -> None:
    client = connect(service.address)
    run = client.create(batch_groups=2, max_staleness=3)
    run.submit([make_task()])
    run.fill(1)
    shown = command("status", "--run", run.run_id, "--address", service.address)
    assert shown.returncode == 0, shown.stderr
    for words in (
        run.run_id,
        "workers: no worker holds a lease",
        "1 of 2 groups",
        "at most 3",
        "groups, balanced",
        "accepted",
    ):
        assert words in shown.stdout
    values = json.loads(command("status", "--run", run.run_id, "--json", RB_ADDRESS=service.address).stdout)
    assert values["run_id"] == run.run_id
    assert values["groups"]["balanced"] is True
    assert values["groups"]["queued"]["groups"] == "1"
    assert values["waits_on"] == "workers: no worker holds a lease"
    client.create()
    assert run.run_id in command("status", "--address", service.address).stdout
    client.channel.close()


def test_status_of_what_is_not_there_says_so(service: ServiceProcess) -> None:
    nobody = command("status", "--run", "nobody", "--address", service.address)
    assert nobody.returncode == 1
    assert "there is no run 'nobody'" in nobody.stderr
    nowhere = command("status", "--address", "127.0.0.1:1", "--timeout-s", "2")
    assert nowhere.returncode == 1
    assert "the service at 127.0.0.1:1 does not answer" in nowhere.stderr
    assert "Traceback" not in nobody.stderr + nowhere.stderr


# ── worker ───────────────────────────────────────────────────────────────────

SERVICE = ServiceOptions(address="127.0.0.1:50051")
BASE = {"run_id": "r", "reward": "module:function"}


def test_worker_options_reach_the_worker() -> None:
    options = to_options(SERVICE, {**BASE, "engine_urls": ["http://a:1", "http://b:2"], "groups_per_engine": 3})
    assert options.engine_urls == ("http://a:1", "http://b:2")
    assert options.groups_per_engine == 3
    simulated = to_options(SERVICE, {**BASE, "simulate": True, "engines": 4, "tokens_per_s": 50.0}).simulated
    assert simulated == SimulatedOptions(engines=4, tokens_per_s=50.0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "engines"),
        ({"simulate": True, "engine_urls": ["http://a:1"]}, "engines"),
        ({"engine_urls": ["http://a:1"], "engine_flag": ["--tp 2"]}, "--engine-flag"),
        ({"engine_urls": ["http://a:1"], "seed": 1}, "--seed"),
        ({"engine_urls": ["http://a:1"], "engines": 2}, "--engines"),
        ({"simulate": True, "reward": "nonsense"}, "reward"),
    ],
    ids=str,
)
def test_worker_options_that_contradict_each_other_are_refused(given: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as error:
        to_options(SERVICE, {**BASE, **given})
    assert error.value.attributes["field"] == field


def test_a_worker_without_engines_ends_with_a_clear_error() -> None:
    shown = command("worker", "--run", "r", "--reward", "m:f")
    assert shown.returncode == 2
    assert "engine" in shown.stderr
    assert "Traceback" not in shown.stderr
