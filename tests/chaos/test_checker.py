"""The checker of histories shares no code with what it checks: it reads JSON, and imports nothing else."""

import ast
import sys
from pathlib import Path

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
