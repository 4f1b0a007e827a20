"""Tests of which checkout make installs into an environment: the one that the environment belongs to, and no other."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
"""


class Checkout:
    """A folder with the project's Makefile and what its environment is made of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copy(ROOT / "Makefile", folder)
        for name in ("pyproject.toml", "constraints.txt"):
            (folder / name).touch()

    @property
    def log(self) -> Path:
        """Return what the programs of its own environment were called with."""
        return self.folder / "called"

    @property
    def stamp(self) -> Path:
        return self.folder / ".venv/.installed"

    def add_environment(self) -> None:
        """Programs that say in `log` that they were called."""
        programs = self.folder / ".venv/bin"
        programs.mkdir(parents=True)
        for name in ("python", "ruff"):
            (programs / name).write_text(PROGRAM.format(log=self.log))
            (programs / name).chmod(0o755)

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        assert MAKE
        around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(
            [MAKE, target], cwd=self.folder, env=around, capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self) -> list[str]:
        """Since the last time."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def first(tmp_path: Path) -> Checkout:
    """One that is installed into an environment of its own."""
    checkout = Checkout(tmp_path / "the first")
    checkout.add_environment()
    assert checkout.make("install").returncode == 0
    assert [call.rsplit(" ", 2)[1:] for call in checkout.calls()] == [["-e", ".[dev]"]]
    return checkout


@pytest.fixture
def second(tmp_path: Path, first: Checkout) -> Checkout:
    """One whose environment is a link to that."""
    checkout = Checkout(tmp_path / "second")
    (checkout.folder / ".venv").symlink_to(first.folder / ".venv")
    return checkout


def test_nothing_is_installed_again_before_something_changed(first: Checkout) -> None:
    assert first.make("install").returncode == 0
    assert first.calls() == []
    os.utime(first.folder / "pyproject.toml", (first.stamp.stat().st_mtime + 9,) * 2)
    assert first.make("install").returncode == 0
    assert len(first.calls()) == 1


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("written", [True, False], ids=["stamp", "older stamp"])
def test_the_environment_of_another_checkout_is_left_alone_in_one_line(
    first: Checkout, second: Checkout, changed: bool, written: bool
) -> None:
    if not written:
        first.stamp.write_text("")
    newer = first.stamp.stat().st_mtime + (9 if changed else -9)
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(second.folder / name, (newer, newer))
    for target in ("install", "type", "test-fast"):
        done = second.make(target)
        assert done.returncode != 0
        said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        (line,) = said
        assert line.startswith(f"install: .venv belongs to the checkout {first.folder}, ")
    assert first.calls() == []


def test_what_needs_a_program_alone_takes_it_from_wherever_it_is(first: Checkout, second: Checkout) -> None:
    done = second.make("ruff")
    assert done.returncode == 0, done.stderr
    assert first.calls() == ["ruff check", "ruff format --check"]


def test_an_environment_elsewhere_that_this_checkout_was_installed_into_is_its_own(tmp_path: Path) -> None:
    elsewhere, only = Checkout(tmp_path / "environments"), Checkout(tmp_path / "only")
    elsewhere.add_environment()
    (only.folder / ".venv").symlink_to(elsewhere.folder / ".venv")
    for _ in range(2):
        assert only.make("install").returncode == 0
    assert only.stamp.read_text() == f"{only.folder}\n"
    assert len(elsewhere.calls()) == 1
