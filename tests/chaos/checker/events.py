"""Events of a run as its participants saw them: every call with its arguments, its begin, its end and its answer.

Invariants: begins and ends are stamped in one order, by one process or by the one clock of its host that never jumps.
So "a ended before b began" is a fact. A call without an end was never answered, and may or may not have been carried
out, as may one that failed. Everything is JSON, so that a history that breaks a promise can be kept and checked again.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

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
class Events:
    """Calls in order of their begins."""

    ops: list[Op] = field(default_factory=list)

    def of(self, *kinds: str, ok: bool | None = None) -> list[Op]:
        """Calls of these kinds, in order of their begins; `ok`: only (un)acknowledged ones."""
        return [op for op in self.ops if op.kind in kinds and (ok is None or op.ok == ok)]

    def acknowledged(self, *kinds: str) -> list[Op]:
        """Acknowledged calls of these kinds in order of their ends."""
        return sorted(self.of(*kinds, ok=True), key=Op.ended)

    def save(self, path: Path) -> Path:
        """Write them as JSON lines."""
        with path.open("w") as file:
            file.writelines(json.dumps(asdict(op)) + "\n" for op in self.ops)
        return path

    @classmethod
    def load(cls, *paths: Path) -> Self:
        """Read what processes have written, each into a file of its own: a line at a call's begin, one at its end.

        The last line of a process that was killed may be a part of one.
        """
        ops: dict[tuple[Path, int, str, str], Op] = {}
        for path in paths:
            for op in _lines(path):
                ops[path, op.begin, op.actor, op.kind] = op
        return cls(sorted(ops.values(), key=lambda op: op.begin))

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)


def _lines(path: Path) -> Iterable[Op]:
    for line in path.read_text().splitlines():
        try:
            yield Op(**json.loads(line))
        except json.JSONDecodeError:
            continue
