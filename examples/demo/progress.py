"""Display of the running demo: a live bar on a terminal, a line every few steps elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.demo.records import DemoStep

_LINE_EVERY_STEPS = 10


class Display:
    """Stages and steps for a person."""

    def __init__(self, steps: int) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._steps = steps
        self._started = time.perf_counter()
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, facts="waiting for the first batch")

    def stage(self, text: str) -> None:
        """A stage begins, or a fact of one."""
        self._console.print(f"[dim]{time.perf_counter() - self._started:6.1f} s[/dim]  {text}", soft_wrap=True)

    def waiting(self, text: str) -> None:
        """On whom the trainer waits right now."""
        self._bar.update(self._task, facts=text)

    def step(self, record: DemoStep) -> None:
        """A step is done."""
        facts = (
            f"reward {record.reward:.3f}  staleness {record.staleness_mean:.2f} (max {record.staleness_max})  "
            f"queue {record.queued_groups}  {record.tokens_per_s:,.0f} tokens/s"
        )
        self._bar.update(self._task, advance=1, facts=facts)
        done = record.step + 1
        if not self._console.is_terminal and (done % _LINE_EVERY_STEPS == 0 or done in (1, self._steps)):
            left_s = (self._steps - done) * record.mean_step_s
            self.stage(f"step {done}/{self._steps}  {facts}  {left_s:.0f} s left")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
