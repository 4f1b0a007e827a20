"""The `rollout-buffer run` commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import CallOptions, JsonOption, PresetOption, SetOption

run_app = typer.Typer(
    help="Create, watch, change, hold and end the runs of a service.\n\nA run is one training job: a policy, a queue, "
    "counters and ledgers of its own.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The run.")]


@run_app.command("list")
@runs("buffer_cli.run.runs:list_runs")
def list_(service: CallOptions, as_json: JsonOption = False) -> None:
    """List the runs: step, version, queue, tasks, and on whom each one waits."""


@run_app.command()
@runs("buffer_cli.run.runs:show")
def show(name: Name, service: CallOptions, as_json: JsonOption = False) -> None:
    """Show where a run stands, as `status` does, and its whole policy."""


@run_app.command()
@runs("buffer_cli.run.runs:create")
def create(
    name: Name,
    service: CallOptions,
    preset: PresetOption = "",
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a run and print its effective policy.

    Fields that are not set take their preset's value, or their default. A run that exists with the same policy is
    found; one with another policy is an error.

    Example: rollout-buffer run create math-1 --preset 'areal(4)' --set batch_groups=64 --set filter_equal_rewards=true
    """


@run_app.command()
@runs("buffer_cli.run.runs:policy")
def policy(
    name: Name,
    service: CallOptions,
    preset: PresetOption = "",
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the effective policy of a run, or change it while it runs.

    With --set, only these fields change. With --preset, the policy starts anew from the preset; batch_groups and the
    environments stay. What changed is printed, field by field.

    Example: rollout-buffer run policy math-1 --set environments.math.share=3 --set environments.code.share=1
    """


@run_app.command()
@runs("buffer_cli.run.record:record")
def record(
    name: Name,
    folder: Annotated[
        Path, typer.Argument(help="Where the tables are; one that holds a part of them is gone on with.")
    ],
    service: CallOptions = CallOptions(timeout_s=60.0),
    groups: Annotated[
        bool, typer.Option("--groups", help="The tokens of the groups too, as far as they are still stored.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until SIGTERM or Ctrl-C.")] = False,
) -> None:
    """Write what happened to a run's groups to Parquet files: lengths, rewards, versions, and what became of each.

    The run's policy must say record_groups=true. Needs the extra rollout-buffer[record]. See docs/recording.md.
    """


@run_app.command()
@runs("buffer_cli.run.evaluations:list_evaluations")
def evaluations(name: Name, service: CallOptions, as_json: JsonOption = False) -> None:
    """List the evaluations of a run: version, how far each one is, and on whom it waits.

    Their results stay until they are deleted, or the run is.
    """


@run_app.command()
@runs("buffer_cli.run.runs:pause")
def pause(name: Name, service: CallOptions) -> None:
    """Hold a run: no leases, no submits, no new batches. What is in flight may still land."""


@run_app.command()
@runs("buffer_cli.run.runs:drain")
def drain(name: Name, service: CallOptions) -> None:
    """Let a run end: no leases and no submits any more; what is queued or being generated is still trained.

    The trainer's pulls go on until too little for a batch is left, and are refused then.
    """


@run_app.command("continue")
@runs("buffer_cli.run.runs:continue_")
def continue_(name: Name, service: CallOptions) -> None:
    """Undo `pause` and `drain`."""


@run_app.command()
@runs("buffer_cli.run.runs:delete")
def delete(
    name: Name,
    service: CallOptions = CallOptions(timeout_s=300.0),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a run and everything stored for it. There is no way back.

    Asks first, unless --yes is given; without a terminal to ask on, nothing is deleted.
    """
