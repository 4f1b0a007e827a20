"""The `rollout-buffer run` commands and their options. What a command runs is imported when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.access import with_access
from buffer_cli.exits import EXIT_OPTIONS
from buffer_cli.options import SERVICE, AddressOption, JsonOption, PresetOption, SetOption, TimeoutOption

run_app = typer.Typer(
    help="Create, watch, change, hold and end the runs of a service.\n\nA run is one training job: a policy, a queue, "
    "counters and ledgers of its own.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The run.")]


@run_app.command("list")
@with_access
def list_(address: AddressOption = SERVICE, as_json: JsonOption = False, timeout_s: TimeoutOption = 10.0) -> None:
    """List the runs: step, version, queue, tasks, and on whom each one waits."""
    from buffer_cli.run import runs

    raise typer.Exit(runs.perform(address, timeout_s, lambda calls: runs.list_runs(calls, as_json=as_json)))


@run_app.command()
@with_access
def show(
    name: Name, address: AddressOption = SERVICE, as_json: JsonOption = False, timeout_s: TimeoutOption = 10.0
) -> None:
    """Show where a run stands, as `status` does, and its whole policy."""
    from buffer_cli.run import runs

    raise typer.Exit(runs.perform(address, timeout_s, lambda calls: runs.show(calls, name, as_json=as_json)))


@run_app.command()
@with_access
def create(
    name: Name,
    preset: PresetOption = "",
    assignments: SetOption = None,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Create a run and print its effective policy.

    Fields that are not set take their preset's value, or their default. A run that exists with the same policy is
    found; one with another policy is an error.

    Example: rollout-buffer run create math-1 --preset 'areal(4)' --set batch_groups=64 --set filter_equal_rewards=true
    """
    from buffer_cli.run import runs

    given = assignments or []
    raise typer.Exit(
        runs.perform(address, timeout_s, lambda calls: runs.create(calls, name, preset, given, as_json=as_json))
    )


@run_app.command()
@with_access
def policy(
    name: Name,
    preset: PresetOption = "",
    assignments: SetOption = None,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Print the effective policy of a run, or change it while it runs.

    With --set, only these fields change. With --preset, the policy starts anew from the preset; batch_groups and the
    environments stay. What changed is printed, field by field.

    Example: rollout-buffer run policy math-1 --set environments.math.share=3 --set environments.code.share=1
    """
    from buffer_cli.run import runs

    given = assignments or []
    raise typer.Exit(
        runs.perform(address, timeout_s, lambda calls: runs.policy(calls, name, preset, given, as_json=as_json))
    )


@run_app.command()
@with_access
def record(
    name: Name,
    folder: Annotated[
        Path, typer.Argument(help="Where the tables are; one that holds a part of them is gone on with.")
    ],
    groups: Annotated[
        bool, typer.Option("--groups", help="The tokens of the groups too, as far as they are still stored.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until SIGTERM or Ctrl-C.")] = False,
    address: AddressOption = SERVICE,
    timeout_s: TimeoutOption = 60.0,
) -> None:
    """Write what happened to a run's groups to Parquet files: lengths, rewards, versions, and what became of each.

    The run's policy must say record_groups=true. Needs the extra rollout-buffer[record]. See docs/recording.md.
    """
    try:
        from buffer_cli.run.record import record
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        sys.stderr.write("run record writes Parquet, for which pyarrow has to be installed: the extra `record`\n")
        raise typer.Exit(EXIT_OPTIONS) from None

    raise typer.Exit(record(address, name, folder, whole=groups, follow=follow, timeout_s=timeout_s))


@run_app.command()
@with_access
def evaluations(
    name: Name, address: AddressOption = SERVICE, as_json: JsonOption = False, timeout_s: TimeoutOption = 10.0
) -> None:
    """List the evaluations of a run: version, how far each one is, and on whom it waits.

    Their results stay until they are deleted, or the run is.
    """
    from buffer_cli.run import evaluations

    raise typer.Exit(evaluations.list_evaluations(address, timeout_s, name, as_json=as_json))


@run_app.command()
@with_access
def pause(name: Name, address: AddressOption = SERVICE, timeout_s: TimeoutOption = 10.0) -> None:
    """Hold a run: no leases, no submits, no new batches. What is in flight may still land."""
    from buffer_cli.run import runs

    raise typer.Exit(runs.perform(address, timeout_s, lambda calls: runs.pause(calls, name)))


@run_app.command()
@with_access
def drain(name: Name, address: AddressOption = SERVICE, timeout_s: TimeoutOption = 10.0) -> None:
    """Let a run end: no leases and no submits any more; what is queued or being generated is still trained.

    The trainer's pulls go on until too little for a batch is left, and are refused then.
    """
    from buffer_cli.run import runs

    raise typer.Exit(runs.perform(address, timeout_s, lambda calls: runs.drain(calls, name)))


@run_app.command("continue")
@with_access
def continue_(name: Name, address: AddressOption = SERVICE, timeout_s: TimeoutOption = 10.0) -> None:
    """Undo `pause` and `drain`."""
    from buffer_cli.run import runs

    raise typer.Exit(runs.perform(address, timeout_s, lambda calls: runs.continue_(calls, name)))


@run_app.command()
@with_access
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    address: AddressOption = SERVICE,
    timeout_s: TimeoutOption = 300.0,
) -> None:
    """Delete a run and everything stored for it. There is no way back.

    Asks first, unless --yes is given; without a terminal to ask on, nothing is deleted.
    """
    from buffer_cli.run import runs

    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes", param_hint="--yes")
    raise typer.Exit(
        runs.perform(address, timeout_s, lambda calls: runs.delete(calls, name, None if yes else typer.confirm))
    )
