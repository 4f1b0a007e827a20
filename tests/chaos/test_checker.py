"""The checker of histories shares no code with what it checks: it reads JSON, and imports nothing else."""

import ast
import sys
from pathlib import Path

from tests.chaos.defects import DEFECTS

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
