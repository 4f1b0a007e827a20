"""`rollout-buffer status`: the state of a run, for people or as JSON."""

import time

import typer
from rich.console import Console

from buffer_cli.calls import Calls, calling
from buffer_cli.display import INTERVAL_S
from buffer_cli.options import CallOptions
from buffer_cli.output import print_json
from buffer_cli.status import watch as watching
from buffer_cli.status.reading import as_values, read
from buffer_cli.status.summary import print_run
from buffer_service.domain.ops import RunView
from buffer_wire.estimate import Estimate
from buffer_wire.messages import value_of
from rollout_buffer.v1 import runs_pb2

SIMULATED_S, ASK_AGAIN_S = 3.0, 0.2
"""Time that a single look waits for the simulation of the run, and from one question to the next."""


def show(
    service: CallOptions, run_id: str | None, *, watch: bool, interval_s: float | None, as_json: bool
) -> int | None:
    """Print where a run stands, with `watch` again and again until a signal; returns the exit code."""
    if interval_s is not None and not watch:
        raise typer.BadParameter("is for --watch", param_hint="--interval")
    with calling(Calls, service) as calls:
        run_ids = [run_id] if run_id else calls.list()
        if len(run_ids) != 1:
            _choose(calls.address, run_ids, as_json=as_json)
            return None
        if watch:
            return watching.watch(calls, run_ids[0], interval_s or INTERVAL_S, as_json=as_json)
        run, view = _simulated(calls, run_ids[0])
    if as_json:
        print_json(as_values(run, view))
    else:
        print_run(Console(highlight=False), view, value_of(Estimate, run.estimate))
    return None


def _simulated(calls: Calls, run_id: str) -> tuple[runs_pb2.Run, RunView]:
    """Read a run, again while the service simulates it; it answers what it has meanwhile."""
    deadline = time.monotonic() + SIMULATED_S
    run, view = read(calls, run_id)
    while run.estimate.predicted.pending and time.monotonic() < deadline:
        time.sleep(ASK_AGAIN_S)
        run, view = read(calls, run_id)
    return run, view


def _choose(address: str, run_ids: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"runs": run_ids})
    elif run_ids:
        print("runs, name one of them with --run: " + ", ".join(run_ids))
    else:
        print(f"the service at {address} has no run yet")
