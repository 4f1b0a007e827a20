"""`rollout-buffer top`: all runs of a service, again and again until Ctrl-C or SIGTERM."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TypeAlias

import typer
from rich.console import Console, Group
from rich.text import Text

from buffer_cli.calls import Calls, calling
from buffer_cli.display import INTERVAL_S, Signals, clock, now, screen
from buffer_cli.options import CallOptions
from buffer_cli.status.rates import Rates, Snapshot
from buffer_cli.status.reading import as_values
from buffer_cli.top.listing import Row, check_order, listing, ordered, read_all
from buffer_wire.errors import RolloutBufferError

_Display: TypeAlias = Callable[[list[Row], str], None]
"""Shows the rows, and since when the service is away ("": it is not)."""


def top(service: CallOptions, sort: str, *, once: bool, interval_s: float | None, as_json: bool) -> int:
    """Show all runs until a signal, or once; returns the exit code. Raises InvalidField, RolloutBufferError."""
    check_order(sort)
    if once and interval_s is not None:
        raise typer.BadParameter("is not for --once", param_hint="--interval")
    console = Console(highlight=False)
    with calling(Calls, service) as calls:
        looks = _Looks(calls, sort)
        if once:
            (_show_json if as_json else _lines(console, calls))(looks.look(), "")
            return 0
        try:
            with Signals() as signals:
                with signals.end_it():
                    rows = looks.look()
                with _display(console, calls, as_json=as_json) as display, signals.end_it():
                    _go_on(looks, rows, interval_s or INTERVAL_S, display)
        except KeyboardInterrupt:
            return 0


class _Looks:
    """Looks at all runs, each with rates since the one before."""

    def __init__(self, calls: Calls, sort: str) -> None:
        self._calls = calls
        self._sort = sort
        self._before: Mapping[str, Snapshot] = {}

    def look(self) -> list[Row]:
        """Read all runs. Raises RolloutBufferError."""
        rows, snapshots = [], {}
        for run, view in read_all(self._calls):
            after = snapshots[view.run_id] = Snapshot.at(view, time.monotonic())
            before = self._before.get(view.run_id)
            rows.append(Row(run, view, Rates.between(before, after) if before else None))
        self._before = snapshots
        return ordered(rows, self._sort)


def _go_on(looks: _Looks, rows: list[Row], interval_s: float, display: _Display) -> NoReturn:
    away = ""
    while True:
        display(rows, away)
        time.sleep(interval_s)
        try:
            rows, away = looks.look(), ""
        except RolloutBufferError as error:
            if not error.retryable:
                raise
            away = away or f"what is shown is from before {clock()}: {error.message}"


@contextmanager
def _display(console: Console, calls: Calls, *, as_json: bool) -> Iterator[_Display]:
    if as_json:
        yield _show_json
    elif not console.is_terminal:
        yield _lines(console, calls)
    else:
        with screen(console) as draw:
            yield lambda rows, away: draw(_frame(calls, rows, away))


def _frame(calls: Calls, rows: list[Row], away: str) -> Group:
    head = Text(f"{len(rows)} runs at {calls.address}, {clock()}; Ctrl-C ends", style="dim")
    return Group(head, *([Text(away, style="bold red")] if away else []), listing(rows))


def _lines(console: Console, calls: Calls) -> _Display:
    def show(rows: list[Row], away: str) -> None:
        if away:
            console.print(Text(away))
        elif rows:
            console.print(listing(rows))
        else:
            print(f"the service at {calls.address} has no run yet", flush=True)

    return show


def _show_json(rows: list[Row], away: str) -> None:
    """Print a JSON object in a line."""
    runs = [{**as_values(row.run, row.view), "per_second": row.rates.values() if row.rates else None} for row in rows]
    print(json.dumps({"time": now(), "away": bool(away), "notice": away, "runs": runs}), flush=True)
