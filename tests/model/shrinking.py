"""A shorter history that still makes model and subject disagree.

Histories are replayed operation by operation and need no Hypothesis, so they shrink fast: operations go, in ever
smaller portions; then groups of a push and what is special about them, tasks of a submit, and rules of a policy.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import InvalidRequest
from tests.model.notation import PLAIN, Entry
from tests.model.pair import Disagreement, Pair
from tests.model.subjects import Subject

History = Sequence[Entry]


def replay(subject: Subject, history: History, kind: type[Pair] = Pair) -> None:
    """Do all of it on a new run. Raises Disagreement."""
    pair = kind(subject, "replayed", Counter())
    for entry in history:
        pair.do(entry)


def shrink(subject: Subject, found: Disagreement, *, seconds: float, kind: type[Pair] = Pair) -> Disagreement:
    """The disagreement of the shortest history that was found in that time."""
    until = time.monotonic() + seconds
    best = found

    def try_out(history: History) -> bool:
        nonlocal best
        if time.monotonic() > until:
            return False
        try:
            replay(subject, history, kind)
        except Disagreement as smaller:
            # What comes after the disagreement does not matter. Another one is another history.
            if _kind(smaller) == _kind(found):
                best = smaller
                return True
        return False

    if try_out(found.history):
        _remove(lambda: best.history, try_out)
        _simplify(lambda: best.history, try_out)
        _remove(lambda: best.history, try_out)
    return best


def _kind(found: Disagreement) -> tuple[str, str]:
    """Return what disagreed, over which operation."""
    return found.history[-1].operation, found.what.partition(":")[0]


def _remove(present: Callable[[], History], try_out: Callable[[History], bool]) -> None:
    """Leave out portions, from the end; half of the history at first, one entry at last."""
    portion = max(1, len(present()) // 2)
    while portion:
        start = len(present()) - portion
        while start >= 0:
            history = present()
            try_out([*history[:start], *history[start + portion :]])
            start = min(start, len(present())) - portion
        portion //= 2


def _simplify(present: Callable[[], History], try_out: Callable[[History], bool]) -> None:
    index = 0
    while index < len(present()):
        history = present()
        simpler = (one for one in _simpler(history[index]))
        if not any(try_out([*history[:index], one, *history[index + 1 :]]) for one in simpler):
            index += 1


def _simpler(entry: Entry) -> Iterator[Entry]:
    """The entry with one thing less."""
    match entry.args:
        case (RunPolicy() as policy,):
            for changed in _plainer(policy):
                yield dataclasses.replace(entry, args=(changed,))
        case (list() as groups,) if entry.operation == "push":
            for i in range(len(groups) if len(groups) > 1 else 0):
                names = (*entry.names[:i], *entry.names[i + 1 :])
                yield dataclasses.replace(entry, args=([*groups[:i], *groups[i + 1 :]],), names=names)
            for i, group in enumerate(groups):
                for name, value in PLAIN["GroupFacts"].items():
                    # What was written lies under its size.
                    if getattr(group.facts, name) != value and not (group.nonce and name in {"stored", "size_bytes"}):
                        plainer = dataclasses.replace(group, facts=dataclasses.replace(group.facts, **{name: value}))
                        yield dataclasses.replace(entry, args=([*groups[:i], plainer, *groups[i + 1 :]],))
        case (ops.Submit() as submit,) if len(submit.tasks) > 1:
            for i in range(len(submit.tasks)):
                fewer = [*submit.tasks[:i], *submit.tasks[i + 1 :]]
                yield dataclasses.replace(entry, args=(dataclasses.replace(submit, tasks=fewer),))
        case _:
            pass


def _plainer(policy: RunPolicy) -> Iterator[RunPolicy]:
    """One field as it is by default."""
    for field in dataclasses.fields(policy):
        if getattr(policy, field.name) != field.default:
            default: Any = field.default
            try:
                plainer = dataclasses.replace(policy, **{field.name: default})
            except InvalidRequest:
                continue
            if plainer != policy:
                yield plainer
