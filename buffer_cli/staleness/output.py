"""Output of `plan`, `simulate`, `lab` and `worth`: results, progress, and errors that name an option."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from buffer_wire.errors import InvalidField
from rollout_lab.simulator import SimulationResult

_OPTIONS = frozenset(
    {
        *("concurrency", "groups_per_batch", "group_size", "rho", "turn_tokens", "turn_latency", "reload_pause"),
        *("publish_lag", "groups_in_flight", "rollout_gpus", "train_gpus", "switch_pause", "slot_tps"),
        *("tailness", "length_mean", "length_sigma", "length_cap"),
        *("policy", "queue_factor", "max_staleness", "micro_batch"),
        *("gpus", "rollout_tps_per_gpu", "train_tps_per_gpu", "batches", "concurrencies"),
        *("steps", "warmup"),
    }
)


def as_options(command: Callable[[], int]) -> int:
    """Run the command and return its exit code; a value that it refuses is named as the option that it came from."""
    try:
        return command()
    except InvalidField as error:
        field, value, limit = (str(error.attributes[name]) for name in ("field", "value", "limit"))
        name = {"mean_length": "length_mean", "policy.preset": "policy"}.get(field, field)
        if name not in _OPTIONS:
            raise
        renamed = InvalidField(f"--{name.replace('_', '-')}", value.strip("'"), limit)
        for note in getattr(error, "__notes__", ()):
            renamed.add_note(note)
        raise renamed from error


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
