"""`rollout-buffer status` and its options."""

from typing import Annotated

import typer

from buffer_cli.command import runs
from buffer_cli.options import CallOptions, JsonOption, RunOption


@runs("buffer_cli.status.show:show")
def status(
    service: CallOptions,
    run_id: RunOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, with rates, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float | None, typer.Option("--interval", min=0.1, help="Seconds between two looks of --watch. Default: 2.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where a run stands: ledgers, queue, staleness, filter, engines, failures, and on whom it waits.

    With --watch a terminal is redrawn in place, and anything else gets a line for each look, with --json an object. A
    service that is away meanwhile is waited for.
    """
