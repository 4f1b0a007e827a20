"""A checkout that is named is what tests import; one that is misspelt is an error and not a stand-in."""

import importlib
from pathlib import Path

import pytest

from tests.support import upstreams


@pytest.mark.parametrize("package", ["miles", "prime_rl", "slime"])
def test_package_comes_from_the_checkout(package: str) -> None:
    root = upstreams.checkout(package)
    if root is None:
        pytest.skip(f"{upstreams.variable(package)} is not set")
    module = importlib.import_module(f"{package}.trainer.batch" if package == "prime_rl" else f"{package}.utils.types")
    assert Path(str(module.__file__)).is_relative_to(root)


def test_folder_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILES_SRC", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"MILES_SRC=.*'miles'"):
        upstreams.checkout("miles")
