"""`rollout-buffer status`: the state of a run, for people or as JSON."""

import json

from rich.console import Console

from buffer_cli.calls import RunCalls, calling
from buffer_cli.exits import exit_code
from buffer_cli.status.reading import as_values, read
from buffer_cli.status.standing import print_run
from buffer_cli.status.watch import watch
from buffer_wire.estimate_messages import estimate_of


def show(address: str, run_id: str | None, *, as_json: bool, timeout_s: float, again_s: float | None = None) -> int:
    """Print where a run stands, with `again_s` every so many seconds until a signal; returns the exit code."""

    def command() -> int:
        with calling(RunCalls, address, timeout_s) as runs:
            return _show(runs, run_id, again_s, as_json=as_json)

    return exit_code(command)


def _show(runs: RunCalls, run_id: str | None, again_s: float | None, *, as_json: bool) -> int:
    run_ids = [run_id] if run_id else runs.list()
    if len(run_ids) != 1:
        return _choose(runs.address, run_ids, as_json=as_json)
    if again_s is not None:
        return watch(runs, run_ids[0], again_s, as_json=as_json)
    run, view = read(runs, run_ids[0])
    if as_json:
        print(json.dumps(as_values(run, view), indent=2))
    else:
        print_run(Console(highlight=False), view, estimate_of(run.estimate))
    return 0


def _choose(address: str, run_ids: list[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"runs": run_ids}, indent=2))
    elif run_ids:
        print("runs, name one of them with --run: " + ", ".join(run_ids))
    else:
        print(f"the service at {address} has no run yet")
    return 0
