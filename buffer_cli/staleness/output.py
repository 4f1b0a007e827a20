"""Output of `plan`, `simulate`, `lab` and `worth`: results, progress, and errors that name an option."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from typing import Any, ParamSpec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from buffer_service.simulator import SimulationResult
from buffer_wire.errors import InvalidField

P = ParamSpec("P")

_NAMES = {"mean_length": "length_mean", "policy.preset": "policy"}
"""Options of fields that are named otherwise."""


def naming_options(action: Callable[P, None]) -> Callable[P, None]:
    """Have an action name a value that it refuses as the option that it came from."""

    @functools.wraps(action)
    def act(*args: P.args, **options: P.kwargs) -> None:
        try:
            action(*args, **options)
        except InvalidField as error:
            field, value, limit = (str(error.attributes[name]) for name in ("field", "value", "limit"))
            name = _NAMES.get(field, field)
            groups = (fields(group) for group in options.values() if is_dataclass(group))
            if name not in {*options, *(one.name for group in groups for one in group)}:
                raise
            renamed = InvalidField(f"--{name.replace('_', '-')}", value.strip("'"), limit)
            for note in getattr(error, "__notes__", ()):
                renamed.add_note(note)
            raise renamed from error

    return act


def figures(*values: float) -> list[str]:
    """Versions, as tables show them."""
    return [f"{value:.2f}" for value in values]


def result_values(result: SimulationResult) -> dict[str, Any]:
    """A simulation's result as JSON values."""
    return {**asdict(result), "length_bias": result.length_bias}


@contextmanager
def progress(total: int, word: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, and nothing elsewhere; called with how many are done."""
    console = Console(stderr=True)
    columns = TextColumn(word), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=total < 2 or not sys.stderr.isatty()) as bar:
        task = bar.add_task(word, total=total)
        yield lambda done: bar.update(task, completed=done)
