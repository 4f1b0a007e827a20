"""Checkouts of the projects that adapters are for, whose own code then takes what the adapters give.

A variable of the environment names each: AREAL_SRC, MILES_SRC, PRIME_RL_SRC, SLIME_SRC. `make test-upstreams` passes
them on, in an environment that has what those projects import; every other target leaves them out, and tests there have
stand-ins or are skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDERS = {
    "areal": (".",),
    "miles": (".",),
    "prime_rl": ("src", "packages/prime-rl-configs/src"),
    "slime": (".",),
}
"""Folders by package, where its modules lie in a checkout."""


def variable(package: str) -> str:
    """The variable that names a checkout of `package`."""
    return f"{package.upper()}_SRC"


def checkout(package: str) -> Path | None:
    """The checkout of `package` that is named, from then on importable; None where none is.

    Raises FileNotFoundError for a folder without the package: a misspelt path must not end in a stand-in.
    """
    named = os.environ.get(variable(package))
    if not named:
        return None
    root = Path(named).resolve()
    folders = [root / folder for folder in _FOLDERS[package]]
    if not (folders[0] / package).is_dir():
        raise FileNotFoundError(f"{variable(package)}={named} holds no package {package!r}")
    # Behind our own: checkouts have folders `examples` and `tests` too.
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
    return root


def needs(package: str) -> pytest.MarkDecorator:
    """The mark of tests that only a checkout of `package` makes sense of."""
    absent = checkout(package) is None
    return pytest.mark.skipif(absent, reason=f"no checkout of {package}: {variable(package)} is not set")


def described() -> list[str]:
    """A line for each checkout that is named, with its commit."""
    lines = []
    for package in _FOLDERS:
        if (root := checkout(package)) is not None:
            command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            lines.append(f"upstream {package}: {root} at {commit or 'an unknown commit'}")
    return lines
