"""Pins of environments: two files that are installed together name one version of a package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOGETHER = re.findall(
    r"^packages_[\w-]+ := (?:-c|-r) (constraints/[\w-]+\.txt)", (ROOT / "Makefile").read_text(), re.MULTILINE
)


def pins(file: Path) -> dict[str, str]:
    """Return versions by package, its name in one spelling."""
    lines = [line for line in file.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


def test_make_installs_such_files_together() -> None:
    assert {"constraints/trl.txt", "constraints/upstreams.txt"} <= set(TOGETHER)


@pytest.mark.parametrize("file", sorted(set(TOGETHER)))
def test_pins_agree(file: str) -> None:
    main, more = pins(ROOT / "constraints.txt"), pins(ROOT / file)
    assert {name: (main[name], more[name]) for name in main.keys() & more.keys() if main[name] != more[name]} == {}
