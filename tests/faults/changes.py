"""Changes to a history that keeps every promise, by the promise that each breaks."""

from collections.abc import Callable

from tests.chaos.checker.events import Facts, Op
from tests.chaos.checker.promises import PROMISES
from tests.faults.history import History

Change = Callable[[History], None]
CHANGES: dict[str, list[Change]] = {check.__name__: [] for check in PROMISES}


def breaks(promise: str) -> Callable[[Change], Change]:
    def enter(change: Change) -> Change:
        CHANGES[promise].append(change)
        return change

    return enter


def calls(history: History, kind: str, **given: object) -> list[Op]:
    return [op for op in history.of(kind) if given.items() <= op.given.items()]


def last_view(history: History) -> Facts:
    return calls(history, "view")[-1].got


def events(history: History) -> list[list[object]]:
    found: list[list[object]] = calls(history, "recording")[0].got["events"]
    return found


def shard(op: Op) -> list[Facts]:
    found: list[Facts] = op.got["groups"]
    return found


def again(history: History, op: Op) -> Op:
    """Make the same call once more, later."""
    copy = history.copy().ops[history.ops.index(op)]
    copy.begin, copy.end = history.tick(), history.tick()
    history.ops.append(copy)
    return copy
