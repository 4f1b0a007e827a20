"""Actions of the `rollout-buffer run` commands."""

import json
import sys
from collections.abc import Callable, Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buffer_cli import policies
from buffer_cli.calls import RunCalls, calling
from buffer_cli.exits import exit_code
from buffer_cli.status.reading import as_values, read
from buffer_cli.status.standing import print_run, state
from buffer_service.domain.ops import RunView
from buffer_service.observability.diagnosis import Standing, waits_on
from buffer_wire.errors import StoreFault, UnknownRun
from buffer_wire.estimate_messages import estimate_of
from rollout_buffer.v1 import runs_pb2


def perform(address: str, timeout_s: float, command: Callable[[RunCalls], int]) -> int:
    """Run a command against the service at an address; returns the exit code."""

    def connected() -> int:
        with calling(RunCalls, address, timeout_s) as runs:
            return command(runs)

    return exit_code(connected)


def list_runs(runs: RunCalls, *, as_json: bool) -> int:
    """All runs in short; one that the service cannot read is named on standard error."""
    found: list[tuple[runs_pb2.Run, RunView]] = []
    run_ids = runs.list()
    for run_id in run_ids:
        try:
            found.append(read(runs, run_id))
        except UnknownRun:
            continue  # deleted since it was listed
        except StoreFault as fault:
            if not fault.of_one_run:
                raise
            sys.stderr.write(f"run {run_id} is left out: {fault.message}\n")
    if as_json:
        print(json.dumps([as_values(run, view) for run, view in found], indent=2))
    elif found:
        Console(highlight=False).print(_run_table([view for _, view in found]))
    elif not run_ids:
        print(f"the service at {runs.address} has no run yet")
    return 0


def _run_table(views: Sequence[RunView]) -> Table:
    table = Table("run", "preset", "step", "version", "queued", "leased", "pending", "waits on")
    for view in views:
        table.add_row(
            view.run_id + state(view),
            view.policy.preset,
            str(view.next_step),
            str(view.published.version),
            f"{view.groups['queued'].groups:,}/{view.policy.max_queued_groups:,}",
            f"{view.tasks['leased']:,}",
            f"{view.tasks['pending']:,}",
            escape(waits_on(Standing.of(view))),
        )
    return table


def show(runs: RunCalls, run_id: str, *, as_json: bool) -> int:
    """Print the state of a run, and its whole policy."""
    run, view = read(runs, run_id)
    if as_json:
        print(json.dumps(as_values(run, view), indent=2))
        return 0
    console = Console(highlight=False)
    print_run(console, view, estimate_of(run.estimate))
    console.print(_policy_table(run.policy))
    return 0


def create(runs: RunCalls, run_id: str, preset: str, assignments: Sequence[str], *, as_json: bool) -> int:
    """A new run."""
    message = runs_pb2.RunPolicy(preset=preset)
    policies.assign(message, assignments)
    reply = runs.create(run_id, message)
    if as_json:
        print(json.dumps(_policy_values(reply.run.policy), indent=2))
        return 0
    print(f"run {run_id} created" if reply.created else f"run {run_id} exists already, with this very policy")
    Console(highlight=False).print(_policy_table(reply.run.policy))
    return 0


def policy(runs: RunCalls, run_id: str, preset: str, assignments: Sequence[str], *, as_json: bool) -> int:
    """Show the policy of a run, or change it."""
    reply = runs.get(run_id)
    before = after = reply.run.policy
    if preset or assignments:
        message, names = policies.changed(before, preset, assignments)
        after = runs.update(run_id, message, names)
    if as_json:
        print(json.dumps(_policy_values(after), indent=2))
    elif preset or assignments:
        differences = list(policies.changes(before, after))
        for name, old, new in differences:
            print(f"{name}: {old} -> {new}")
        if not differences:
            print("nothing changes")
    else:
        Console(highlight=False).print(_policy_table(after))
    return 0


def _policy_values(message: runs_pb2.RunPolicy) -> dict[str, object]:
    values: dict[str, object] = MessageToDict(message, preserving_proto_field_name=True)
    return values


def _policy_table(effective: runs_pb2.RunPolicy) -> Table:
    """Fields as --set writes them; bold where they are not what a run has whose creator sets nothing."""
    default = dict(policies.shown(policies.default_policy()))
    table = Table("policy", "value", "default")
    for name, value in policies.shown(effective):
        usual = default.get(name, "none")
        table.add_row(name, f"[bold]{escape(value)}[/bold]" if value != usual else escape(value), usual)
    return table


def pause(runs: RunCalls, run_id: str) -> int:
    """Hold a run."""
    runs.pause(run_id)
    print(f"run {run_id} is paused: no leases, no submits, no new batches; `run continue {run_id}` lets it go on")
    return 0


def drain(runs: RunCalls, run_id: str) -> int:
    """Let a run end."""
    runs.drain(run_id)
    print(f"run {run_id} is being drained: what is queued and being generated is still trained, nothing new begins")
    return 0


def continue_(runs: RunCalls, run_id: str) -> int:
    """Undo pause and drain."""
    runs.continue_(run_id)
    run, _ = read(runs, run_id)
    print(f"run {run_id} goes on" if not run.paused else f"run {run_id} is still paused: {run.paused}")
    return 0


def delete(runs: RunCalls, run_id: str, confirm: Callable[[str], bool] | None) -> int:
    """Delete a run, after `confirm` agreed to the question if there is one."""
    _, view = read(runs, run_id)
    if confirm is not None:
        live = sum(view.groups[name].groups for name in ("queued", "forming", "delivered"))
        left = f"{live} groups that are not trained, {view.tasks['pending'] + view.tasks['leased']} open tasks"
        if not confirm(f"delete run {run_id} for good, with {left}?"):
            print("nothing was deleted")
            return 1
    runs.delete(run_id)
    print(f"run {run_id} is deleted")
    return 0
