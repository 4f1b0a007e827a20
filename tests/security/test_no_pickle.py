"""Nothing that comes over a wire of ours can run code: nobody unpickles, and there is no other road to it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("buffer_cli", "buffer_conformance", "buffer_service", "buffer_wire", "rollout_lab", "rollout_workers"),
    "trainer_client",
)
UNSAFE_MODULES = {"cloudpickle", "cPickle", "dill", "jsonpickle", "marshal", "pickle", "shelve", "yaml"}
UNSAFE_NAMES = {"eval", "exec", "compile"}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in UNSAFE_MODULES)
            case ast.ImportFrom(module=str(module)):
                if module.partition(".")[0] in UNSAFE_MODULES:
                    yield module
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_NAMES:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(one.arg == "weights_only" and getattr(one.value, "value", None) is True for one in keywords):
                    yield "torch.load without weights_only=True"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle=True"
            case _:
                pass


def test_no_module_can_unpickle() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sources()
        if (names := sorted(set(unsafe(ast.parse(path.read_text())))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "import numpy; numpy.load('x', allow_pickle=True)",
        "eval('1')",
    ],
)
def test_what_is_looked_for_would_be_found(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


def test_tensors_of_a_workers_own_engine_are_written_as_pickle_and_never_read() -> None:
    writers = [path.relative_to(ROOT).as_posix() for path in sources() if "def pickled(" in path.read_text()]
    assert writers == ["rollout_workers/engine/sglang/tensor_pickle.py"]
