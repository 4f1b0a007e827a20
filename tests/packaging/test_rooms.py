"""Tests of what `make lint` says of folders and of imports inside functions."""

import ast
from pathlib import Path

import pytest

from scripts.lint_rooms import MAX_MODULES, crowded, late_imports


def modules(count: int) -> list[Path]:
    return [Path("a/b/__init__.py"), *(Path(f"a/b/m{i}.py") for i in range(count))]


def test_a_folder_may_have_twelve_modules_and_its_own() -> None:
    assert not crowded(modules(MAX_MODULES))
    assert crowded(modules(MAX_MODULES + 1)) == {"a/b": MAX_MODULES + 1}


@pytest.mark.parametrize("name", ["torch", "transformers", "matplotlib.pyplot"])
def test_an_optional_dependency_may_be_imported_late(name: str) -> None:
    assert not list(late_imports(ast.parse(f"def f():\n    import {name}\n")))


@pytest.mark.parametrize("name", ["json", "numpy", "grpc.aio", "buffer_wire.errors", "trainer_client"])
def test_what_is_always_there_may_not(name: str) -> None:
    assert list(late_imports(ast.parse(f"import os\ndef f():\n    if os:\n        import {name}\n"))) == [(4, name)]
    assert list(late_imports(ast.parse(f"async def f():\n    from {name} import x\n"))) == [(2, name)]


def test_an_import_that_is_late_for_its_time_is_a_call_under_way() -> None:
    source = "def f():\n    with CALLS.under_way():\n        from trainer_client.batch import Batch\n"
    assert not list(late_imports(ast.parse(source)))


def test_an_import_in_a_function_within_a_function_counts_once() -> None:
    assert list(late_imports(ast.parse("def f():\n    def g():\n        import json\n"))) == [(3, "json")]
