"""Tests that pods are told what the programs understand: variables are settings, flags are options,
values are taken.
"""

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from buffer_cli.main import app
from buffer_cli.options import ServiceOptions, WeightsOptions
from buffer_cli.worker.start import to_options
from buffer_service.settings import Settings
from buffer_service.store.address import Address, is_cluster
from rollout_workers.options import WorkerOptions
from tests.chart.helm import VALUE_SETS, Document, Pod, environment, every_value_set, pods_of, render_with

CLIENT = {
    *("RB_ADDRESS", "RB_LOG_FORMAT", "RB_INSECURE"),
    *("RB_TLS_CA", "RB_TLS_CLIENT_CERT", "RB_TLS_CLIENT_KEY", "RB_TOKEN_FILE"),
    *("RB_WEIGHTS_TOKEN_FILE", "RB_WEIGHTS_TLS_CA"),
}
"""Variables that a client may be told by its environment."""


def _settings_of(pod: Pod) -> dict[str, str]:
    variables = environment(pod.container("service"))
    return {name.removeprefix("RB_").lower(): value for name, value in variables.items() if name.startswith("RB_")}


@every_value_set
def test_every_variable_of_the_service_is_a_setting_and_its_value_is_taken(values: Path, tmp_path: Path) -> None:
    (pod,) = pods_of(values, "service")
    given = _settings_of(pod)
    if given["store"].startswith("<"):
        given["store"] = "rediss://in-a-secret:6379/0"
    if given.get("payload_store", "").startswith("<"):
        given["payload_store"] = "rediss+cluster://in-a-secret:6379"
    for name in ("payload_writer", "payload_reader"):
        if name in given:
            given[name] = "in:a-secret"
    for name in ("tls_cert", "tls_key", "tls_client_ca", "tokens_file"):
        if name in given:
            given[name] = str(tmp_path / name)
            (tmp_path / name).touch()

    assert set(given) <= set(Settings.model_fields)
    with mock.patch.dict(os.environ, {f"RB_{name.upper()}": value for name, value in given.items()}, clear=True):
        settings = Settings()

    (Address.parse_cluster if is_cluster(settings.store) else Address.parse)(settings.store)
    assert settings.insecure == ("tokens_file" not in given)


def test_the_service_reads_the_authority_of_its_store_from_the_secret() -> None:
    (values,) = [path for path in VALUE_SETS if path.name == "store-url-values.yaml"]
    (pod,) = pods_of(values, "service")
    file = Path(_settings_of(pod)["store_ca"])

    mount = next(mount for mount in pod.container("service")["volumeMounts"] if mount["mountPath"] == str(file.parent))
    secret = pod.volumes[mount["name"]]["secret"]
    assert secret["secretName"] == "store-authority"
    assert secret["items"] == [{"key": "root.pem", "path": file.name}]


def test_numbers_arrive_whole() -> None:
    (values,) = [path for path in VALUE_SETS if path.name == "settings-values.yaml"]
    given = _settings_of(pods_of(values, "service")[0])

    assert given["max_message_bytes"] == "1073741824"
    assert given["blocked_bytes"] == "1099511627776"
    assert given["max_run_tokens"] == "123456789012"
    assert given["drain_grace_s"] == "30.5"


def _options_of(container: Document) -> WorkerOptions:
    """Return what the real command line makes of the arguments and the environment; nothing is started."""
    variables = environment(container)
    arguments = list(container["args"])
    for name, value in variables.items():
        arguments = [argument.replace(f"$({name})", value.strip("<>")) for argument in arguments]
    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    chosen = command.commands[arguments[0]]
    made: list[WorkerOptions] = []

    def run(service: ServiceOptions, weights: WeightsOptions, **given: Any) -> int:
        made.append(to_options(service, {name: value for name, value in given.items() if value is not None}, weights))
        return 0

    with mock.patch.dict(os.environ, variables, clear=True), mock.patch("buffer_cli.worker.start.run", run):
        context = chosen.make_context("worker", arguments[1:])
        with pytest.raises(typer.Exit):
            chosen.invoke(context)
    (options,) = made
    return options


@every_value_set
def test_every_argument_of_a_worker_is_an_option_and_its_value_is_taken(values: Path) -> None:
    for pod in pods_of(values, "worker"):
        container = pod.container("worker")
        assert {name for name in environment(container) if name.startswith("RB_")} <= CLIENT

        options = _options_of(container)

        assert options.worker_id == "POD_NAME"
        assert options.address == environment(container)["RB_ADDRESS"]
        assert options.weights_dir in {Path(mount["mountPath"]) for mount in container["volumeMounts"]}


def test_options_of_values_reach_the_worker() -> None:
    (values,) = [path for path in VALUE_SETS if path.name == "workers-simulated-values.yaml"]
    (pod,) = pods_of(values, "worker")

    options = _options_of(pod.container("worker"))

    assert options.bundle_bytes == 8_388_608
    assert options.simulated is not None
    assert (options.simulated.engines, options.simulated.tokens_per_s, options.simulated.seed) == (64, 90.5, 7)


def test_launched_engines_get_their_flags_in_order() -> None:
    (values,) = [path for path in VALUE_SETS if path.name == "workers-launch-values.yaml"]
    (pod,) = pods_of(values, "worker")

    options = _options_of(pod.container("worker"))

    assert options.launch is not None
    assert options.launch.extra_flags == ("--tp", "2")
    assert options.launch.engines == 2
    assert options.launch.ready_timeout_s == 1200.0


def test_launched_engines_share_the_gpus_of_their_pod() -> None:
    (values,) = [path for path in VALUE_SETS if path.name == "workers-launch-values.yaml"]
    (pod,) = pods_of(values, "worker")

    launch = _options_of(pod.container("worker")).launch

    assert launch is not None
    assert (launch.device, launch.gpus_per_engine) == ("cuda", 2)
    assert launch.sglang_python == Path("/usr/bin/python3")


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("launch: {model_path: /m}", ["--device=cuda"]),
        ("launch: {model_path: /m, device: cpu, engines: 2}, gpus: 2", ["--device=cpu"]),
        ("launch: {model_path: /m}, gpus: 0", []),
    ],
)
def test_launched_engines_run_where_their_pod_says(tmp_path: Path, engine: str, flags: list[str]) -> None:
    pool = "{name: w, run: r, options: {reward: 'm:f'}, resources: {limits: {memory: 9Gi}}, engine: {%s}}"
    engine = f"source: launch, {engine}"
    done = render_with(tmp_path, "security: {insecure: true}\nworkers: [" + pool % engine + "]")

    assert [flag for flag in re.findall('"(--[^"]*)"', done.stdout) if re.match("--(device|gpus)", flag)] == flags


@every_value_set
def test_the_test_runs_a_command_that_exists(values: Path) -> None:
    (pod,) = pods_of(values, "test")
    (container,) = pod.containers
    assert {name for name in environment(container) if name.startswith("RB_")} <= CLIENT
    group, name, *arguments = container["args"]
    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    context = command.commands[group].commands[name].make_context(name, arguments)
    assert context.params["timeout_s"] == 30.0
