"""`rollout-buffer status`: the state of a run, for people or as JSON."""

import typer
from rich.console import Console

from buffer_cli.calls import Calls, calling
from buffer_cli.options import CallOptions
from buffer_cli.output import print_json
from buffer_cli.status import watch as watching
from buffer_cli.status.reading import as_values, read
from buffer_cli.status.summary import print_run
from buffer_wire.estimate import Estimate
from buffer_wire.messages import value_of

INTERVAL_S = 2.0
"""Seconds between two looks of a watch, where nothing else is said."""


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
        run, view = read(calls, run_ids[0])
    if as_json:
        print_json(as_values(run, view))
    else:
        print_run(Console(highlight=False), view, value_of(Estimate, run.estimate))
    return None


def _choose(address: str, run_ids: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"runs": run_ids})
    elif run_ids:
        print("runs, name one of them with --run: " + ", ".join(run_ids))
    else:
        print(f"the service at {address} has no run yet")
