"""The checker of histories shares no code with what it checks: it reads JSON, and imports nothing else.

Its reading of a session's journal finds what it is for: each change to one that keeps every promise breaks one.
"""

import ast
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker.events import Events, Op
from tests.chaos.checker.journal import Bounds, broken_in
from tests.chaos.defects import DEFECTS
from tests.chaos.recovery import STANDSTILL_S, gaps_of, standstills

ROOT = Path(__file__).parents[2]
CHECKER = Path(__file__).parent / "checker"
OWN = "tests.chaos.checker"


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
    return found


def test_the_checker_imports_the_standard_library_alone() -> None:
    files = list(CHECKER.glob("*.py"))
    assert files
    others = {name for file in files for name in imported(file) if not name.startswith(OWN)}
    assert {name.partition(".")[0] for name in others} <= sys.stdlib_module_names


def test_every_planted_defect_has_its_place_in_the_tree(tmp_path: Path) -> None:
    for defect in DEFECTS:
        file = tmp_path / defect.edit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((ROOT / defect.edit.path).read_text())
        defect.edit.apply(tmp_path)


def _op(kind: str, begin_s: float, end_s: float, **given: object) -> Op:
    return Op("x", kind, given, round(begin_s), begin_s, round(end_s), end_s, {})


@pytest.mark.parametrize(("stands_s", "told"), [(STANDSTILL_S - 1, 0), (STANDSTILL_S + 1, 1)])
def test_a_standstill_after_a_fault_is_told_and_slowness_is_not(stands_s: float, told: int) -> None:
    lasts_s = 40.0
    ops = [_op("begins", 0, 0), *(_op("publish", at, at) for at in (1, 9))]
    ops += [_op("strike", 10, 10 + lasts_s, what="it is killed"), _op("ends", 55, 55)]
    assert len(standstills(Events([*ops, _op("publish", 10, 10 + lasts_s + stands_s)]))) == told


@pytest.mark.parametrize(
    ("strikes_s", "step_s", "is_late"), [(13.0, 30.9, False), (13.0, 31.1, True), (18.0, 6.9, False), (18.0, 9.0, True)]
)
def test_a_step_is_due_by_the_bound_of_a_fault_that_struck_before_it_was_due(
    strikes_s: float, step_s: float, is_late: bool
) -> None:
    marks = [_op("begins", 0, 0), _op("publish", 9, 9), _op("strike", 10, 12, what="it is killed")]
    marks += [_op("strike", strikes_s, 36, what="it restarts"), _op("ends", 55, 55)]
    killed = gaps_of(Events([*marks, _op("publish", 10 + step_s, 10 + step_s)]))[1]
    assert killed.step_s == pytest.approx(step_s)
    assert killed.is_late is is_late


BOUNDS = Bounds(max_staleness=2, reuse_max_staleness=4, max_uses=2)
Journal = list[dict[str, Any]]
TOLD: Journal = [
    {"trained": {"step": 0, "train_version": 3, "groups": {"a/0": ["x", 0, 2, 3]}, "mislabelled": 0}},
    {"trained": {"step": 1, "train_version": 4, "groups": {"a/0": ["x", 1, 2, 3]}, "mislabelled": 0}},
    {"trained": {"step": 1, "train_version": 4, "groups": {"a/0": ["x", 1, 2, 3]}, "mislabelled": 0}},
    {"evaluated": {"id": "e", "version": 3, "tasks": 2, "failures": 1, "read": [{"p#0": ["y", 3, 3]}] * 2}},
    {"end": {"balanced": True, "committed_steps": 2, "trained": 1, "lost": 0, "failed": 0}},
]


def _step(number: int, **changes: Any) -> Callable[[Journal], object]:
    return lambda journal: journal[number]["trained"].update(changes)


def _evaluation(**changes: Any) -> Callable[[Journal], object]:
    return lambda journal: journal[3]["evaluated"].update(changes)


def _end(**changes: Any) -> Callable[[Journal], object]:
    return lambda journal: journal[4]["end"].update(changes)


BREAKS: list[tuple[str, Callable[[Journal], object]]] = [
    ("came again with other groups", _step(2, groups={"b/0": ["x", 0, 3, 3]})),
    ("some are missing", _step(0, step=7)),
    ("came with other bytes", _step(0, groups={"a/0": ["z", 0, 2, 3]})),
    ("as one of [1, 1] uses", _step(0, groups={"a/0": ["x", 1, 2, 3]})),
    ("for version 3 has a/0 of 0 to 3", _step(0, groups={"a/0": ["x", 0, 0, 3]})),
    ("for version 3 has a/0 of 2 to 4", _step(0, groups={"a/0": ["x", 0, 2, 4]})),
    ("2 tokens that older weights made", _step(0, mislabelled=2)),
    ("then as {}", _evaluation(read=[{"p#0": ["y", 3, 3]}, {}])),
    ("of 3 tasks has", _evaluation(tasks=3)),
    ("of 2 tasks has", _evaluation(read=[{"p#0": ["y", 3, 3], "p#1": ["y", 3, 3]}] * 2, failures=0)),
    ("of version 3 has", _evaluation(read=[{"p#0": ["y", 3, 4]}] * 2)),
    ("did not end in order", lambda journal: journal.pop()),
    ("the ledger says", _end(trained=2)),
    ("the ledger says", _end(lost=1)),
    ("the ledger says", _end(failed=1)),
    ("the ledger says", _end(balanced=False)),
]


def _broken(journal: Journal, file: Path) -> list[str]:
    # The last line is that of a process that was killed while it wrote.
    file.write_text("\n".join(map(json.dumps, journal)) + '\n{"trained": {"st')
    return broken_in(file, BOUNDS)


def test_a_journal_that_keeps_every_promise_is_left_alone(tmp_path: Path) -> None:
    assert _broken(TOLD, tmp_path / "journal") == []


@pytest.mark.parametrize(("what", "change"), BREAKS)
def test_a_journal_that_breaks_a_promise_is_found(
    what: str, change: Callable[[Journal], object], tmp_path: Path
) -> None:
    journal = copy.deepcopy(TOLD)
    change(journal)
    found = _broken(journal, tmp_path / "journal")
    assert any(what in problem for problem in found), found
