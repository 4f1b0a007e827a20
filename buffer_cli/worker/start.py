"""`rollout-buffer worker`: the options of the command line become WorkerOptions."""

import os
import sys
from pathlib import Path
from typing import Any

from buffer_cli.options import ServiceOptions, WeightsOptions
from buffer_service.observability import logs
from buffer_wire.errors import InvalidField
from rollout_workers.engine.options import LaunchOptions, SimulatedOptions
from rollout_workers.main import EXIT_OPTIONS, run_worker
from rollout_workers.options import AgentOptions, WorkerOptions

_LAUNCH = ("sglang_python", "device", "gpus_per_engine", "ready_timeout_s", "log_dir")
_AGENT = ("agent_tools", "agent_reasoning", "agent_branches", "agent_listen", "agent_advertise")
_SIMULATED = ("tokens_per_s", "slots", "length_median", "length_sigma", "vocab_size", "seed")


def run(service: ServiceOptions, weights: WeightsOptions, **given: Any) -> int:  # noqa: ANN401 - options of a worker
    """Run a worker; returns its exit code."""
    try:
        options = to_options(service, {name: value for name, value in given.items() if value is not None}, weights)
    except InvalidField as error:
        sys.stderr.write(f"error: {error.message}\n")
        return EXIT_OPTIONS
    logs.configure(os.environ.get("RB_LOG_LEVEL", "info"), os.environ.get("RB_LOG_FORMAT", "console"))
    # A console script does not have the working directory on its path, and reward functions live there.
    sys.path.insert(0, str(Path.cwd()))
    return run_worker(options)


def to_options(service: ServiceOptions, given: dict[str, Any], weights: WeightsOptions | None = None) -> WorkerOptions:
    """WorkerOptions of the options that were given. Raises InvalidField."""
    weights = weights or WeightsOptions()
    values = dict(given)
    engines = values.pop("engines", 1)
    agent = values.pop("agent", None)
    agent_values = {name: values.pop(name) for name in _AGENT if name in values}
    _refuse_stray(agent_values, needs="--agent", there=bool(agent))
    model, simulate = values.pop("launch", None), values.pop("simulate", False)
    flags = tuple(values.pop("engine_flag", None) or ())
    launch_values = {name: values.pop(name) for name in _LAUNCH if name in values}
    simulated_values = {name: values.pop(name) for name in _SIMULATED if name in values}
    _refuse_stray({**launch_values, **({"engine_flag": flags} if flags else {})}, needs="--launch", there=bool(model))
    _refuse_stray(simulated_values, needs="--simulate", there=simulate)
    if engines != 1:
        _refuse_stray({"engines": engines}, needs="--launch or --simulate", there=bool(model) or simulate)
    return WorkerOptions(
        address=service.address,
        access=service.access,
        weights_access=weights.access,
        weights_max_mbps=weights.weights_max_mbps,
        weights_tls_cert=weights.weights_tls_cert or "",
        weights_tls_key=weights.weights_tls_key or "",
        weights_mirrors=tuple(values.pop("weights_mirrors", None) or ()),
        engine_urls=tuple(values.pop("engine_urls", None) or ()),
        environment_limits=tuple(values.pop("environment_limits", None) or ()),
        image_hosts=tuple(values.pop("image_hosts", None) or ()),
        launch=LaunchOptions(model, engines=engines, extra_flags=flags, **launch_values) if model else None,
        agent=AgentOptions(agent, **_without("agent_", agent_values)) if agent else None,
        simulated=SimulatedOptions(engines=engines, **simulated_values) if simulate else None,
        **values,
    )


def _without(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items()}


def _refuse_stray(values: dict[str, Any], *, needs: str, there: bool) -> None:
    for name in values if not there else ():
        raise InvalidField(f"--{name.replace('_', '-')}", values[name], f"given together with {needs}")
