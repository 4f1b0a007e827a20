"""The relay of weights as the chart starts it: its own options, and what workers are told of it."""

from pathlib import Path
from unittest import mock

import pytest
import typer

from buffer_cli.main import app
from rollout_workers.relay.options import RelayOptions
from tests.chart.helm import VALUE_SETS, Pod, documents, environment, pods_of

RELAYED = [path for path in VALUE_SETS if path.name.startswith("relay")]
with_a_relay = pytest.mark.parametrize("values", RELAYED, ids=lambda path: path.stem)


def options_of(pod: Pod) -> RelayOptions:
    """Make what the real command line makes of the pod's arguments and environment; nothing is started."""
    container = pod.container("relay")
    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    made: list[RelayOptions] = []

    def run_relay(options: RelayOptions) -> int:
        made.append(options)
        return 0

    name, *arguments = container["args"]
    with (
        mock.patch.dict("os.environ", environment(container), clear=True),
        mock.patch("buffer_cli.relay.start.run_relay", run_relay),
        mock.patch("buffer_cli.relay.start.logs"),
        pytest.raises(typer.Exit),
    ):
        command.commands[name].invoke(command.commands[name].make_context(name, arguments))
    return made[0]


def test_there_are_value_sets_with_a_relay() -> None:
    assert len(RELAYED) == 2


@with_a_relay
def test_the_relay_gets_its_options_and_workers_its_address(values: Path) -> None:
    (relay,), (worker,) = pods_of(values, "relay"), pods_of(values, "worker")
    options = options_of(relay)
    secured = "weights-tls" in relay.volumes
    (service,) = [
        each for each in documents(values, "Service") if each["spec"]["selector"].items() <= relay.labels.items()
    ]
    url = f"http{'s' if secured else ''}://{service['metadata']['name']}.training.svc:8090"
    mirrors = [flag.partition("=")[2] for flag in worker.container("worker")["args"] if "weights-mirror" in flag]

    assert mirrors[0] == url
    assert options.listen == "0.0.0.0:8090"
    assert "/weights" in {mount["mountPath"] for mount in relay.container("relay")["volumeMounts"]}
    assert str(options.directory) == "/weights"
    if secured:
        assert options.upstreams == ("https://trainer.example:8000", "https://relay.example:8090")
        assert (options.max_bytes, options.max_mbps) == (400 * 10**9, 2500.5)
        assert mirrors[1:] == ["https://relay-2.example:8090"]
        for pod in (relay, worker):
            container = pod.container(pod.labels["app.kubernetes.io/component"])
            assert environment(container)["RB_WEIGHTS_TOKEN_FILE"] == "/etc/rollout-buffer/weights-token/token"
            items = pod.volumes["weights-ca"]["secret"]["items"]
            assert items == [{"key": "root.pem", "path": "ca.crt"}]
        assert relay.container("relay")["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"


@with_a_relay
def test_the_relay_has_longer_to_end_than_its_transfers(values: Path) -> None:
    (relay,) = pods_of(values, "relay")
    assert relay.spec["terminationGracePeriodSeconds"] >= options_of(relay).drain_grace_s + 10
