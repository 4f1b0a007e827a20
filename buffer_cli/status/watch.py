"""`rollout-buffer status --watch`: a run's situation again and again, with rates, until Ctrl-C or SIGTERM.

On a terminal it is redrawn in place, on the alternate screen, which is left whatever ends the watch. Elsewhere each
snapshot appends a line. A service that does not answer is waited for once it has answered; other errors end the watch.
"""

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from buffer_cli.calls import Calls
from buffer_cli.display import Signals, clock, now, screen
from buffer_cli.status.rates import Rates, Snapshot, number
from buffer_cli.status.reading import as_values, read
from buffer_cli.status.summary import print_run
from buffer_service.domain.ops import RunView
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_wire.errors import RolloutBufferError
from buffer_wire.estimate import Estimate
from buffer_wire.messages import value_of
from rollout_buffer.v1 import runs_pb2


@dataclass
class Seen:
    """Memory of a watch: the newest snapshot, the one before, the first one, and since when nothing was heard."""

    run: runs_pb2.Run
    view: RunView
    first: Snapshot
    last: Snapshot
    before: Snapshot | None = None
    away_since_s: float | None = None
    notice: str = ""

    @classmethod
    def of(cls, run: runs_pb2.Run, view: RunView, at_s: float) -> "Seen":
        """Memory after the first snapshot."""
        snapshot = Snapshot.at(view, at_s)
        return cls(run, view, snapshot, snapshot)

    def update(self, run: runs_pb2.Run, view: RunView, at_s: float) -> None:
        """Take a newer snapshot."""
        snapshot = Snapshot.at(view, at_s)
        if snapshot.created_ms != self.first.created_ms:
            self.first, self.notice = snapshot, "the run was deleted and created anew"
        elif self.away_since_s is not None:
            away_s = at_s - self.away_since_s
            self.notice = f"the service was away for {away_s:.0f} s, and answers again since {clock()}"
        self.run, self.view, self.before, self.last, self.away_since_s = run, view, self.last, snapshot, None

    def miss(self, at_s: float, why: str) -> None:
        """The service did not answer."""
        if self.away_since_s is None:
            self.away_since_s = at_s
        self.notice = f"waiting for {at_s - self.away_since_s:.0f} s, what is shown is from before: {why}"

    @property
    def rates(self) -> Rates | None:
        """Rates between the last two snapshots."""
        return Rates.between(self.before, self.last) if self.before else None

    @property
    def all_rates(self) -> Rates | None:
        """Rates since the first snapshot."""
        return Rates.between(self.first, self.last)


_Display: TypeAlias = Callable[[Seen], None]
"""Shows the newest state of things."""


def watch(calls: Calls, run_id: str, interval_s: float, *, as_json: bool) -> int:
    """Show a run until Ctrl-C or SIGTERM; returns the exit code. Raises what the first read raises, and later what no
    waiting changes.
    """
    console = Console(highlight=False)
    try:
        with Signals() as signals:
            with signals.end_it():
                seen = Seen.of(*read(calls, run_id), time.monotonic())
            with _display(console, interval_s, as_json=as_json) as display, signals.end_it():
                _go_on(calls, run_id, interval_s, seen, display)
    except KeyboardInterrupt:
        return 0


def _go_on(calls: Calls, run_id: str, interval_s: float, seen: Seen, display: _Display) -> NoReturn:
    while True:
        display(seen)
        time.sleep(interval_s)
        try:
            run, view = read(calls, run_id)
        except RolloutBufferError as error:
            if not error.retryable:
                raise
            seen.miss(time.monotonic(), error.message)
        else:
            seen.update(run, view, time.monotonic())


@contextmanager
def _display(console: Console, interval_s: float, *, as_json: bool) -> Iterator[_Display]:
    if as_json:
        yield _show_json
    elif not console.is_terminal:
        yield _lines()
    else:
        with screen(console) as draw:
            yield lambda seen: draw(_frame(console, seen, interval_s))


def _show_json(seen: Seen) -> None:
    """Print a JSON object in a line."""
    values = {"time": now(), "away": seen.away_since_s is not None, "notice": seen.notice}
    rates = seen.rates
    per_second = rates.values() if rates and not values["away"] else None
    print(json.dumps({**values, "per_second": per_second, "run": as_values(seen.run, seen.view)}), flush=True)


def _lines() -> _Display:
    """Display of a line for each snapshot; one without figures while the service does not answer."""
    told = ""

    def show(seen: Seen) -> None:
        nonlocal told
        away = seen.away_since_s is not None
        if away or seen.notice not in ("", told):
            print(f"{now()} {seen.notice}", flush=True)
        if not away:
            told = seen.notice or told
            print(f"{now()} {_line(seen)}", flush=True)

    return show


def _line(seen: Seen) -> str:
    view, rates = seen.view, seen.rates
    queued = f"queued {view.groups['queued'].groups}/{view.policy.max_queued_groups}"
    facts = [
        f"step {view.next_step}",
        f"version {view.term}.{view.published.version}",
        queued,
        f"pending {view.tasks['pending']}",
        f"leased {view.tasks['leased']}",
    ]
    if rates:
        facts += [
            f"accepted {number(rates.per_second('accepted groups'))} groups/s",
            f"{number(rates.per_second('accepted response tokens'))} tokens/s",
            f"assembled {number(rates.per_second('assembled groups'))} groups/s",
            f"not trained {number(rates.per_second('groups not trained'))} groups/s",
        ]
    return ", ".join([*facts, f"waits on {waits_on(Situation.of(view))}"])


def _frame(console: Console, seen: Seen, interval_s: float) -> RenderableType:
    """The whole terminal."""
    away = seen.away_since_s is not None
    head = Text(f"every {interval_s:g} s, {clock()}; Ctrl-C ends", style="dim")
    notice = [Text(seen.notice, style="bold red" if away else "yellow")] if seen.notice else []
    # What does not fit is cut off at the end: rates, which `status` alone does not have, come first.
    return Group(head, *notice, _rate_table(seen), _standing(console, seen))


def _standing(console: Console, seen: Seen) -> Text:
    """Text that `status` prints, for this terminal."""
    printed = Console(
        file=io.StringIO(),
        width=console.width,
        force_terminal=True,
        color_system=console.color_system,  # type: ignore[arg-type]  # it gives names as plain strings
        highlight=False,
    )
    with printed.capture() as capture:
        print_run(printed, seen.view, value_of(Estimate, seen.run.estimate))
    return Text.from_ansi(capture.get(), no_wrap=True)


def _rate_table(seen: Seen) -> Table | Text:
    last, overall = seen.rates, seen.all_rates
    if last is None or overall is None:
        return Text("rates: with the next look", style="dim")
    table = Table("rates", f"last {last.seconds:.1f} s", f"last {overall.seconds:.0f} s")
    for column in table.columns[1:]:
        column.justify = "right"
    for (name, lately), (_, since) in zip(last.shown(), overall.shown(), strict=True):
        table.add_row(name, lately, since)
    return table
