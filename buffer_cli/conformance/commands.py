"""`rollout-buffer conformance` and its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import JsonOption

conformance_app = typer.Typer(
    help="Does a worker or a trainer follow the protocol? Run it against a live service, with trouble on the way.",
    no_args_is_help=True,
)

Command = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND", help="Starts the candidate; {address} and {run} in it are filled in.", show_default=False
    ),
]


@dataclass(frozen=True)
class SuiteRun:
    """Options of a suite, whatever it is for."""

    service: Annotated[str | None, typer.Option(help="host:port of a service. Default: one of the kit's own.")] = None
    only: Annotated[
        list[str] | None, typer.Option(metavar="SCENARIO", help="Run this scenario alone; repeatable. Default: all.")
    ] = None
    patience_s: Annotated[float, typer.Option("--patience-s", help="Longest time for one scenario.")] = 60.0
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every call and message there, a JSON value a line.")
    ] = None
    as_json: JsonOption = False


@conformance_app.command()
@runs("buffer_cli.conformance.suite:worker")
def worker(
    command: Command,
    suite: SuiteRun,
    weights: Annotated[
        Path | None, typer.Option(help="Directory of weights to publish. Default: versions that need no loading.")
    ] = None,
) -> None:
    """Run a worker through the suite; exit code 1 when it breaks a rule.

    The kit is its trainer: tasks of token ids, two samples each. The worker has to take SIGTERM as the order to end.
    """


@conformance_app.command()
@runs("buffer_cli.conformance.suite:trainer")
def trainer(command: Command, suite: SuiteRun) -> None:
    """Run a trainer through the suite; exit code 1 when it breaks a rule.

    The kit is its workers. The trainer creates the run; it has to train until it is stopped, and is started a second
    time, on the run that is there.
    """
