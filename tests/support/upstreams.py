"""The projects that adapters are for, and the checkouts of those that are on no index.

`UPSTREAMS` is their only list. A line more adds an upstream: make passes its variable on, and `make compatibility` runs
its tests and gives it a row in docs/compatibility.md.

A variable of the environment names a checkout, whose own code then takes what the adapters give. `make test-upstreams`
passes them on, in an environment that has what those projects import; every other target leaves them out, and tests
there have stand-ins or are skipped.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A project with what holds its adapter to it: tests, run by a target of make in an environment of that target."""

    name: str
    """Name of its row; `make compatibility ROWS=…` takes it."""
    title: str
    seam: str
    """Part of it that the tests run, as docs/compatibility.md says it."""
    target: str = "test-upstreams"
    environment: str = ".venv-upstreams"
    tests: tuple[str, ...] = ()
    """Tests of the row; none: all tests of the target."""
    wheels: tuple[str, ...] = ()
    """Distributions in the environment that are tested; none: a checkout is."""
    variable: str = ""
    """Variable of the environment that names the checkout."""
    folders: tuple[str, ...] = (".",)
    """Folders of the checkout where its modules lie, in the first of them the package `name`."""


_MILES = ("tests/upstreams/test_miles_consumers.py", "tests/upstreams/test_stand_ins.py")
UPSTREAMS = (
    Upstream(
        name="trl", title="TRL", seam="`GRPOTrainer` and `AsyncGRPOTrainer` train",
        target="test-trl", environment=".venv-trl", wheels=("trl", "transformers"),
    ),
    Upstream(
        name="verifiers", title="verifiers, environments", seam="environments of the package in a worker",
        target="test-verifiers", environment=".venv-verifiers", wheels=("verifiers",),
    ),
    Upstream(
        name="verifiers-generator", title="verifiers, generator class", seam="its class beside ours, up to 0.1.6",
        target="test-verifiers-generator", environment=".venv-verifiers-generator", wheels=("verifiers",),
    ),
    Upstream(
        name="agents", title="agents", seam="clients and agents, unchanged",
        target="test-agents", environment=".venv-agents",
        wheels=("openai", "anthropic", "openai-agents", "mini-swe-agent"),
    ),
    Upstream(
        name="miles", title="Miles (radixark/miles)",
        seam="its types, data sources, data buffer's consumer and training data",
        variable="MILES_SRC", tests=(*_MILES, "tests/integrations/test_miles_*.py"),
    ),
    Upstream(
        name="slime", title="slime (THUDM/slime)", seam="its types, data source and training data",
        variable="SLIME_SRC", tests=(*_MILES, "tests/integrations/test_miles_rollout.py"),
    ),
    Upstream(
        name="prime_rl", title="PRIME-RL (`bridge prime-rl`)",
        seam="its loader, packing, loss and configuration",
        variable="PRIME_RL_SRC", folders=("src", "packages/prime-rl-configs/src"),
        tests=("tests/upstreams/test_prime_rl.py", "tests/integrations/test_prime_rl_*.py"),
    ),
    Upstream(
        name="areal-trainer", title="AReaL", seam="`PPOTrainer` trains, is killed and recovers",
        target="test-areal", environment=".venv-areal", wheels=("areal",),
    ),
    Upstream(
        name="skyrl", title="SkyRL", seam="`FullyAsyncRayPPOTrainer` trains, is killed and resumes",
        target="test-skyrl", environment=".venv-skyrl", wheels=("skyrl",),
    ),
    Upstream(
        name="verl", title="verl", seam="`FullyAsyncTrainer` trains on Ray, is killed and resumes",
        target="test-verl", environment=".venv-verl", wheels=("verl", "ray"),
    ),
    Upstream(
        name="areal", title="AReaL (preset `areal`)", seam="its staleness manager beside the preset",
        variable="AREAL_SRC", tests=("tests/domain/test_preset_areal.py",),
    ),
)  # fmt: skip

_CHECKOUTS = {upstream.name: upstream for upstream in UPSTREAMS if upstream.variable}


def variable(package: str) -> str:
    """The variable that names a checkout of `package`."""
    return _CHECKOUTS[package].variable


def checkout(package: str) -> Path | None:
    """The checkout of `package` that is named, from then on importable; None where none is.

    Raises FileNotFoundError for a folder without the package: a misspelt path must not end in a stand-in.
    """
    named = os.environ.get(variable(package))
    if not named:
        return None
    root = Path(named).resolve()
    folders = [root / folder for folder in _CHECKOUTS[package].folders]
    if not (folders[0] / package).is_dir():
        raise FileNotFoundError(f"{variable(package)}={named} holds no package {package!r}")
    # Behind our own: checkouts have folders `examples` and `tests` too.
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
    return root


def needs(package: str) -> pytest.MarkDecorator:
    """The mark of tests that only a checkout of `package` makes sense of."""
    absent = checkout(package) is None
    return pytest.mark.skipif(absent, reason=f"no checkout of {package}: {variable(package)} is not set")


def commit_of(root: Path) -> str:
    """The commit of a checkout and its day, and whether files were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    known = git("log", "-1", "--format=%h (%cs)", "--abbrev=7")
    return (known + " with changes" * bool(git("status", "--porcelain", "-uno"))) if known else "an unknown commit"


def described() -> list[str]:
    """A line for each checkout that is named, with its commit."""
    found = {package: checkout(package) for package in _CHECKOUTS}
    return [f"upstream {package}: {root} at {commit_of(root)}" for package, root in found.items() if root is not None]
