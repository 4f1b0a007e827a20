"""`rollout-buffer conformance` and its options. What it runs is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

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
Service = Annotated[str | None, typer.Option(help="host:port of a service. Default: one of the kit's own.")]
Patience = Annotated[float, typer.Option("--patience-s", help="Longest time for one scenario.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="SCENARIO", help="Run this scenario alone; repeatable. Default: all.")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write every call and message there, a JSON value a line.")
]


@conformance_app.command()
def worker(
    command: Command,
    service: Service = None,
    weights: Annotated[
        Path | None, typer.Option(help="Directory of weights to publish. Default: versions that need no loading.")
    ] = None,
    only: Only = None,
    patience_s: Patience = 60.0,
    trace: Trace = None,
    as_json: JsonOption = False,
) -> None:
    """Run a worker through the suite; exit code 1 when it breaks a rule.

    The kit is its trainer: tasks of token ids, two samples each. The worker has to take SIGTERM as the order to end.
    """
    given = dict(locals())
    from buffer_cli.conformance.suite import run

    raise typer.Exit(run("worker", given))


@conformance_app.command()
def trainer(
    command: Command,
    service: Service = None,
    only: Only = None,
    patience_s: Patience = 60.0,
    trace: Trace = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trainer through the suite; exit code 1 when it breaks a rule.

    The kit is its workers. The trainer creates the run; it has to train until it is stopped, and is started a second
    time, on the run that is there.
    """
    given = dict(locals())
    from buffer_cli.conformance.suite import run

    raise typer.Exit(run("trainer", given))
