"""`rollout-buffer top` and its options."""

from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import CallOptions, JsonOption


@runs("buffer_cli.top.show:top")
def top(
    service: CallOptions,
    sort: Annotated[
        str,
        typer.Option(help="Order: run (by name), or step, queued, leased, pending, tokens or lost, the most first."),
    ] = "run",
    once: Annotated[bool, typer.Option("--once", help="One look, without rates.")] = False,
    interval_s: Annotated[
        float | None, typer.Option("--interval", min=0.1, help="Seconds between two looks. Default: 2.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show all runs again and again: what each waits on, where it stands, and its rates, until Ctrl-C.

    A terminal is redrawn in place; anything else gets the runs anew with each look, with --json an object in a line. A
    service that is away meanwhile is waited for.
    """
