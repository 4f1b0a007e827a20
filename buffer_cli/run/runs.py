"""Actions of the `rollout-buffer run` commands."""

import sys
from collections.abc import Sequence

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buffer_cli import output, policies
from buffer_cli.calls import Calls, calling, run_ref
from buffer_cli.options import CallOptions
from buffer_cli.output import print_json
from buffer_cli.status.reading import as_values, read
from buffer_cli.status.summary import print_run
from buffer_cli.top.listing import Row, listing, read_all
from buffer_wire.estimate import Estimate
from buffer_wire.messages import value_of
from rollout_buffer.v1 import runs_pb2


def list_runs(service: CallOptions, *, as_json: bool) -> None:
    """All runs in short; one that the service cannot read is named on standard error."""
    with calling(Calls, service) as calls:
        rows = [Row(*read) for read in read_all(calls)]
    if as_json:
        print_json([as_values(row.run, row.view) for row in rows])
    elif rows:
        output.show(listing(rows))
    else:
        print(f"the service at {service.address} has no run that can be read")


def show(name: str, service: CallOptions, *, as_json: bool) -> None:
    """Print the state of a run, and its whole policy."""
    with calling(Calls, service) as calls:
        run, view = read(calls, name)
    if as_json:
        print_json(as_values(run, view))
        return
    print_run(Console(highlight=False), view, value_of(Estimate, run.estimate))
    output.show(_policy_table(run.policy))


def create(name: str, service: CallOptions, preset: str, assignments: Sequence[str] | None, *, as_json: bool) -> None:
    """A new run, or the one that is there with the same policy."""
    message = runs_pb2.RunPolicy(preset=preset)
    policies.assign(message, assignments or ())
    with calling(Calls, service) as calls:
        reply = calls.call(calls.runs.CreateRun, runs_pb2.CreateRunRequest(run_id=name, policy=message))
    if as_json:
        print_json(_policy_values(reply.run.policy))
        return
    print(f"run {name} created" if reply.created else f"run {name} exists already, with this very policy")
    output.show(_policy_table(reply.run.policy))


def policy(name: str, service: CallOptions, preset: str, assignments: Sequence[str] | None, *, as_json: bool) -> None:
    """Show the policy of a run, or change it."""
    with calling(Calls, service) as calls:
        before = after = calls.get(name).run.policy
        if preset or assignments:
            message, names = policies.changed(before, preset, assignments or ())
            # No name stands for all fields.
            request = runs_pb2.UpdatePolicyRequest(run=run_ref(name), policy=message, fields=sorted(names))
            after = calls.call(calls.runs.UpdatePolicy, request).policy
    if as_json:
        print_json(_policy_values(after))
    elif preset or assignments:
        differences = list(policies.changes(before, after))
        for field, old, new in differences:
            print(f"{field}: {old} -> {new}")
        if not differences:
            print("nothing changes")
    else:
        output.show(_policy_table(after))


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


def pause(name: str, service: CallOptions) -> None:
    """Hold a run."""
    with calling(Calls, service) as calls:
        calls.call(calls.runs.PauseRun, runs_pb2.PauseRunRequest(run=run_ref(name)))
    print(f"run {name} is paused: no leases, no submits, no new batches; `run continue {name}` lets it go on")


def drain(name: str, service: CallOptions) -> None:
    """Let a run end."""
    with calling(Calls, service) as calls:
        calls.call(calls.runs.DrainRun, runs_pb2.DrainRunRequest(run=run_ref(name)))
    print(f"run {name} is being drained: what is queued and being generated is still trained, nothing new begins")


def continue_(name: str, service: CallOptions) -> None:
    """Undo pause and drain."""
    with calling(Calls, service) as calls:
        calls.call(calls.runs.ContinueRun, runs_pb2.ContinueRunRequest(run=run_ref(name)))
        run = calls.get(name).run
    print(f"run {name} goes on" if not run.paused else f"run {name} is still paused: {run.paused}")


def delete(name: str, service: CallOptions, *, yes: bool) -> int:
    """Delete a run; without `yes`, after the question was answered so. Returns the exit code."""
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes", param_hint="--yes")
    with calling(Calls, service) as calls:
        _, view = read(calls, name)
        live = sum(view.groups[state].groups for state in ("queued", "forming", "delivered"))
        left = f"{live} groups that are not trained, {view.tasks['pending'] + view.tasks['leased']} open tasks"
        if not yes and not typer.confirm(f"delete run {name} for good, with {left}?"):
            print("nothing was deleted")
            return 1
        calls.call(calls.runs.DeleteRun, runs_pb2.DeleteRunRequest(run=run_ref(name)))
    print(f"run {name} is deleted")
    return 0
