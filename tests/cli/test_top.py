"""Tests of `rollout-buffer top`: all runs, what each waits on, in 80 columns."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from buffer_cli.status.rates import Rates, Snapshot
from buffer_cli.top.listing import Row, listing, ordered
from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import RunPolicy
from rollout_buffer.v1 import runs_pb2
from tests.support.commands import command
from tests.support.fake_runs import FakeRuns
from tests.support.views import make_view


def row(name: str, *, queued: int = 0, decoded: int = 0) -> Row:
    view = make_view(
        RunPolicy(max_queued_groups=2_000_000),
        run_id=name,
        groups={"queued": Amount(queued)},
        tasks={"leased": 123_456_789, "pending": 123_456_789},
        next_step=1_234_567,
    )
    later = replace(view, statistics={**view.statistics, "decoded_tokens": decoded})
    return Row(runs_pb2.Run(), view, Rates.between(Snapshot.at(view, 0.0), Snapshot.at(later, 1.0)))


def shown(rows: list[Row]) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(listing(rows))
    return capture.get().splitlines()


def test_every_run_says_what_it_waits_on_and_its_figures_in_80_columns() -> None:
    lines = shown([row("r" * 64, queued=1_999_999, decoded=12_345_678), row("small")])
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert "r" * 64 in text
    assert text.count("waits on") == 2
    assert [name for name in ("2 M/2 M", "12,345,678", "123.5 M", "1.235 M") if name not in text] == []
    figures = next(line for line in lines if "12,345,678" in line)
    assert len(figures) == len(lines[0]), "figures end below their headings"


def test_runs_are_sorted_by_the_figure_that_is_asked_for_and_else_by_name() -> None:
    rows = [row("b", queued=1), row("a", queued=1, decoded=5), row("c", queued=7)]
    names = {order: [one.view.run_id for one in ordered(rows, order)] for order in ("run", "queued", "tokens")}
    assert names == {"run": ["a", "b", "c"], "queued": ["c", "a", "b"], "tokens": ["a", "b", "c"]}


@pytest.fixture(scope="module")
def runs() -> Iterator[FakeRuns]:
    # The servicer's other methods stay unimplemented.
    with FakeRuns() as fake:  # type: ignore[abstract]
        yield fake


def test_one_look_is_a_table_or_an_object(runs: FakeRuns) -> None:
    table = command("top", "--once", "--address", runs.address, COLUMNS="80")
    assert (table.returncode, table.stderr) == (0, "")
    assert "math-1: waits on" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 80
    values = json.loads(command("top", "--once", "--json", "--address", runs.address).stdout)
    assert (values["away"], [one["run_id"] for one in values["runs"]]) == (False, ["math-1"])
    assert values["runs"][0]["waits_on"]
    assert values["runs"][0]["per_second"] is None


def test_an_order_that_there_is_not_is_refused_with_those_that_there_are(runs: FakeRuns) -> None:
    refused = command("top", "--once", "--sort", "size", "--address", runs.address)
    assert refused.returncode == 2
    assert "queued" in refused.stderr
