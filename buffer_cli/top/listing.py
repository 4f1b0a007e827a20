"""Runs in short: what each waits on, and below it a line of figures, within 80 columns."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from buffer_cli.calls import Calls
from buffer_cli.output import count
from buffer_cli.status.rates import Rates, number
from buffer_cli.status.reading import read
from buffer_cli.status.summary import state
from buffer_service.domain.ops import RunView
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_wire.errors import InvalidField, StoreFault, UnknownRun
from rollout_buffer.v1 import runs_pb2


@dataclass(frozen=True, slots=True)
class Row:
    """A run as it was sent and as its words need it; rates since the look before, None where there was none."""

    run: runs_pb2.Run
    view: RunView
    rates: Rates | None = None


def read_all(calls: Calls) -> Iterator[tuple[runs_pb2.Run, RunView]]:
    """All runs in the order of their names; one that the service cannot read is named on standard error."""
    for run_id in calls.list():
        try:
            yield read(calls, run_id)
        except UnknownRun:
            continue  # deleted since it was listed
        except StoreFault as fault:
            if not fault.of_one_run:
                raise
            sys.stderr.write(f"run {run_id} is left out: {fault.message}\n")


def _rate(row: Row, name: str) -> float:
    return row.rates.per_second(name) if row.rates else 0.0


_ORDERS: Mapping[str, Callable[[Row], float]] = {
    "run": lambda _: 0,
    "step": lambda row: row.view.next_step,
    "queued": lambda row: row.view.groups["queued"].groups,
    "leased": lambda row: row.view.tasks["leased"],
    "pending": lambda row: row.view.tasks["pending"],
    "tokens": lambda row: _rate(row, "decoded tokens"),
    "lost": lambda row: _rate(row, "groups not trained"),
}


def check_order(name: str) -> None:
    """Raises InvalidField for an order that there is not."""
    if name not in _ORDERS:
        raise InvalidField("--sort", name, f"one of {', '.join(_ORDERS)}")


def ordered(rows: Sequence[Row], order: str) -> list[Row]:
    """Rows with the most first, and by name where they have as much."""
    return sorted(rows, key=lambda row: (-_ORDERS[order](row), row.view.run_id))


_WIDTHS = {"step": 9, "version": 9, "queued": 17, "leased": 9, "pending": 9, "accepted/s": 12, "tokens/s": 12}


def listing(rows: Sequence[Row]) -> Text:
    """Runs with what they wait on; the figures below each stand under the headings."""
    head = "".join(name.rjust(width) for name, width in _WIDTHS.items())
    lines = [Text(head, style="dim")]
    for row in rows:
        name = Text(row.view.run_id, style="bold")
        lines += [name.append(f"{state(row.view)}: waits on {waits_on(Situation.of(row.view))}", style="not bold")]
        lines += [
            Text("".join(value.rjust(width) for value, width in zip(_figures(row), _WIDTHS.values(), strict=True)))
        ]
    return Text("\n").join(lines)


def _figures(row: Row) -> Iterator[str]:
    view = row.view
    yield _short(view.next_step)
    yield _short(view.published.version)
    yield f"{_short(view.groups['queued'].groups)}/{_short(view.policy.max_queued_groups)}"
    yield _short(view.tasks["leased"])
    yield _short(view.tasks["pending"])
    yield number(row.rates.per_second("accepted groups")) if row.rates else "-"
    yield number(row.rates.per_second("decoded tokens")) if row.rates else "-"


def _short(value: int) -> str:
    """A figure of at most seven characters."""
    return count(value, exact_below=10**6)
