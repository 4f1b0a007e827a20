"""Recording of a history: participants note every call that they make, when it begins and when it ends.

One process numbers begins and ends itself. Where participants are processes, each stamps them with the host's
monotonic clock. It writes each call to a file of its own as it begins and as it ends: a kill leaves what was known.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from buffer_wire.errors import RolloutBufferError
from rollout_workers.changes import Changes
from tests.chaos.checker.events import Events, Op


@dataclass(slots=True)
class History(Events):
    """Calls in order of their begins."""

    now: int = 0
    """Begins and ends so far."""
    changes: Changes = field(default_factory=Changes)
    file: IO[str] | None = None
    """File of one process of several; without, this process is the only one."""

    def tick(self) -> int:
        """The next stamp."""
        self.now += 1
        self.changes.notify()
        return self.now if self.file is None else time.monotonic_ns()

    @asynccontextmanager
    async def call(self, actor: str, kind: str, **given: Any) -> AsyncIterator[Op]:
        """Record the call that the block makes, which sets `reply`. Errors of the contract are noted and go on."""
        op = Op(actor, kind, given, self.tick(), time.monotonic())
        self._enter(op)
        try:
            yield op
        except RolloutBufferError as error:
            op.error = error.reason
            self._end(op)
            raise
        if op.reply is not None:
            self._end(op)

    def _end(self, op: Op) -> None:
        op.end, op.end_s = self.tick(), time.monotonic()
        self._write(op)

    def _enter(self, op: Op) -> None:
        self.ops.append(op)
        self._write(op)

    def _write(self, op: Op) -> None:
        if self.file is not None:
            self.file.write(json.dumps(asdict(op)) + "\n")
            self.file.flush()

    def note(self, actor: str, kind: str, **given: Any) -> Op:
        """Record something that is no call: it begins and ends now."""
        op = Op(actor, kind, given, self.tick(), time.monotonic(), reply={})
        op.end, op.end_s = op.begin, op.begin_s
        self._enter(op)
        return op

    async def until(self, met: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
        """Wait for something of which the history's participants tell. Its deadline names it."""
        if not await self.changes.until(met, timeout_s):
            told = [f"{op.actor} {op.kind} {op.error or op.given}" for op in self.ops[-12:]]
            raise TimeoutError(f"{what}: not within {timeout_s} s; the last calls: {told}")

    async def passed(self, events: int) -> None:
        """Wait until so many more begins and ends were recorded."""
        at = self.now + events
        await self.until(lambda: self.now >= at, f"{events} more events")

    @classmethod
    def load(cls, *paths: Path) -> Self:
        """Read what was written."""
        history = super(History, cls).load(*paths)
        history.now = max((op.end or op.begin for op in history), default=0)
        return history

    def copy(self) -> "History":
        """One that may be changed without changing this one."""
        return History([Op(**json.loads(json.dumps(asdict(op)))) for op in self.ops], self.now)


async def gather_or_cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks and wait until they have ended; errors of theirs come up."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
