"""`rollout-buffer status` and its options. What it runs is imported when it runs."""

from typing import Annotated

import typer

from buffer_cli.access import with_access
from buffer_cli.options import SERVICE, AddressOption, JsonOption, TimeoutOption


@with_access
def status(
    run_id: Annotated[str | None, typer.Option("--run", help="May be left out where there is only one.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, with rates, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float | None, typer.Option("--interval", min=0.1, help="Seconds between two looks of --watch. Default: 2.")
    ] = None,
    address: AddressOption = SERVICE,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """Show where a run stands: ledgers, queue, staleness, filter, engines, failures, and on whom it waits.

    With --watch a terminal is redrawn in place, and anything else gets a line for each look, with --json an object. A
    service that is away meanwhile is waited for.
    """
    from buffer_cli.status.show import show

    if interval_s is not None and not watch:
        raise typer.BadParameter("is for --watch", param_hint="--interval")
    again_s = (interval_s or 2.0) if watch else None
    raise typer.Exit(show(address, run_id, as_json=as_json, timeout_s=timeout_s, again_s=again_s))
