"""Events of a run as its participants saw them: every call with its arguments, its begin, its end and its answer.

Invariants: begins and ends are numbered in one order, that of this process, so "a ended before b began" is a fact; a
call without an end was never answered, and may or may not have been carried out, as may one that failed; everything is
JSON, so that a history that breaks a promise can be kept, read and checked again.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from buffer_wire.errors import RolloutBufferError
from rollout_workers.changes import Changes

Facts = dict[str, Any]


@dataclass(slots=True)
class Op:
    """One call. `reply` is set when it was answered, `error` (a reason) when it failed, neither when nobody knows."""

    actor: str
    kind: str
    given: Facts
    begin: int
    begin_s: float = 0.0
    """On the monotonic clock, as `end_s`."""
    end: int | None = None
    end_s: float = 0.0
    reply: Facts | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """True when it was acknowledged."""
        return self.reply is not None

    @property
    def got(self) -> Facts:
        """The reply of an acknowledged call."""
        assert self.reply is not None, self
        return self.reply

    def ended(self) -> int:
        """Tell when the answer came; beyond every time for a call without one."""
        return self.end if self.end is not None else 1 << 62

    def before(self, other: "Op") -> bool:
        """True when this call had ended before the other one began."""
        return self.ended() < other.begin


@dataclass(slots=True)
class History:
    """Calls in order of their begins."""

    ops: list[Op] = field(default_factory=list)
    now: int = 0
    """Begins and ends so far."""
    changes: Changes = field(default_factory=Changes)

    def tick(self) -> int:
        """The next number."""
        self.now += 1
        self.changes.notify()
        return self.now

    @asynccontextmanager
    async def call(self, actor: str, kind: str, **given: Any) -> AsyncIterator[Op]:
        """Record the call that the block makes, which sets `reply`. Errors of the contract are noted and go on."""
        op = Op(actor, kind, given, self.tick(), time.monotonic())
        self.ops.append(op)
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

    def note(self, actor: str, kind: str, **given: Any) -> Op:
        """Record something that is no call: it begins and ends now."""
        op = Op(actor, kind, given, self.tick(), time.monotonic(), reply={})
        op.end, op.end_s = op.begin, op.begin_s
        self.ops.append(op)
        return op

    def of(self, *kinds: str, ok: bool | None = None) -> list[Op]:
        """Calls of these kinds, in order of their begins; `ok`: only (un)acknowledged ones."""
        return [op for op in self.ops if op.kind in kinds and (ok is None or op.ok == ok)]

    def ended(self, *kinds: str) -> list[Op]:
        """Acknowledged calls of these kinds in order of their ends."""
        return sorted(self.of(*kinds, ok=True), key=Op.ended)

    async def until(self, met: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
        """Wait for something of which the history's participants tell. Its deadline names it."""
        if not await self.changes.until(met, timeout_s):
            told = [f"{op.actor} {op.kind} {op.error or op.given}" for op in self.ops[-12:]]
            raise TimeoutError(f"{what}: not within {timeout_s} s; the last calls: {told}")

    async def passed(self, events: int) -> None:
        """Wait until so many more begins and ends were recorded."""
        at = self.now + events
        await self.until(lambda: self.now >= at, f"{events} more events")

    # ── kept ─────────────────────────────────────────────────────────────────

    def save(self, path: Path) -> Path:
        """Write it as JSON lines."""
        with path.open("w") as file:
            file.writelines(json.dumps(asdict(op)) + "\n" for op in self.ops)
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """The inverse of `save`."""
        ops = [Op(**json.loads(line)) for line in path.read_text().splitlines()]
        return cls(ops, max((op.end or op.begin for op in ops), default=0))

    def copy(self) -> "History":
        """One that may be changed without changing this one."""
        return History([Op(**json.loads(json.dumps(asdict(op)))) for op in self.ops], self.now)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)


async def gather_or_cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks and wait until they have ended; errors of theirs come up."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
