"""The staleness of a live run, as people read it: predicted beside measured, what it depends on, what to change."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from buffer_cli.output import print_fact
from buffer_wire.estimate import Estimate

MAX_ADVICE = 4
_NOTHING = "-"


def print_estimate(console: Console, estimate: Estimate) -> None:
    """The whole block; a line alone where nothing can be told yet."""
    if not estimate.publishes:
        reason = estimate.unknown[0].reason if estimate.unknown else "nothing was measured"
        print_fact(console, "estimate", f"none yet: {reason}")
        _print_verdict(console, estimate)
        return
    console.print(f"staleness, over the last {estimate.publishes} publishes, {_seconds(estimate.window_s)}")
    console.print(Padding(_versions(estimate), (0, 0, 0, 2)))
    for name, value in _facts(estimate):
        print_fact(console, name, value)
    _print_verdict(console, estimate)
    for index, one in enumerate(estimate.advice[:MAX_ADVICE]):
        print_fact(console, "" if index else "advice", f"{index + 1}. {one.text}")
    for reason, names in _missing(estimate).items():
        print_fact(console, "not known", f"{', '.join(names)}: {reason}")


def _print_verdict(console: Console, estimate: Estimate) -> None:
    for index, sentence in enumerate(estimate.verdict.sentences):
        print_fact(console, "" if index else "verdict", sentence)


def _versions(estimate: Estimate) -> Table:
    predicted, measured = estimate.predicted, estimate.measured
    table = Table(Column("versions", overflow="fold"))
    for name in ("pre-queue", "in-queue", "total", "of tokens", "worst so far"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(
        "predicted, rough" if predicted.rough else "predicted",
        *map(_number, (predicted.pre_queue, predicted.in_queue, predicted.staleness)),
    )
    worst = _NOTHING if measured.worst is None else str(measured.worst)
    table.add_row(
        "measured", *map(_number, (measured.pre_queue, measured.in_queue, measured.staleness, measured.tokens)), worst
    )
    for one in measured.environments if len(measured.environments) > 1 else ():
        name = escape(one.environment) or "(none)"
        table.add_row(f"{name}, so far", *map(_number, (one.pre_queue, one.in_queue, one.staleness, one.tokens)))
    return table


def _facts(estimate: Estimate) -> Iterator[tuple[str, str]]:
    known, predicted = estimate.quantities, estimate.predicted
    if predicted.form:
        yield "simulated" if predicted.simulated else "closed form", "; ".join((predicted.form, *predicted.notes))
    throughput = _known(
        ("engines decode {} tokens/s", known.rollout_tokens_per_s, ",.0f"),
        ("the trainer trains {} while it works", known.train_tokens_per_s, ",.0f"),
        ("ρ {}", known.rho, ".2f"),
    )
    if throughput:
        yield "throughput", throughput
    shares = _known(
        ("engines busy {}", known.engine_busy_share, ".0%"),
        ("trainer idle {}", known.trainer_idle_share, ".0%"),
        ("{} tokens/s trained", known.trained_tokens_per_s, ",.0f"),
        ("{} s a batch", known.train_period_s, ".3g"),
    )
    if shares:
        yield "over all", shares
    loop = _known(
        ("C {}", known.concurrency, ".0f"),
        ("C/B {}", known.concurrency_ratio, ".2f"),
        ("q {}", known.queue_factor, ".2g"),
        ("M {}", known.tailness, ".2f"),
        ("{} tokens a response", known.mean_length, ",.0f"),
        ("{} s a group", known.group_generation_s, ".3g"),
    )
    if loop:
        yield "loop", loop


def _known(*parts: tuple[str, float | None, str]) -> str:
    return ", ".join(words.format(format(value, how)) for words, value, how in parts if value is not None)


def _missing(estimate: Estimate) -> dict[str, list[str]]:
    """Names of what is not known, by the reason."""
    names: dict[str, list[str]] = {}
    for one in estimate.unknown:
        names.setdefault(one.reason, []).append(one.name)
    return names


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"
