"""Python in the docs compiles, and what it imports from this project is there."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.pages import Block, blocks, pages

OURS = {"buffer_service", "buffer_wire", "examples", "rollout_buffer", "rollout_workers", "trainer_client"}
OPTIONAL = {
    *("accelerate", "anthropic", "datasets", "hydra", "openai", "pandas", "ray", "skyrl", "trl", "verifiers", "verl"),
    "wandb",
}
"""Packages that examples use and .venv need not have."""

BLOCKS = [block for page in pages() for block in blocks(page) if block.language in {"python", "py"}]
MARKED = {block.where: block for block in BLOCKS}


@pytest.mark.parametrize("block", BLOCKS, ids=MARKED)
def test_a_block_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


@pytest.mark.parametrize("block", BLOCKS, ids=MARKED)
def test_what_a_block_imports_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                resolve(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "a relative import"
            for alias in node.names:
                resolve(node.module, alias.name)


def resolve(module: str, name: str = "") -> None:
    """Raises ImportError where `module`, or `name` in it, does not exist."""
    package = module.split(".", maxsplit=1)[0]
    if package in OURS:
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            # A module of ours that needs an extra says so; its names are read from its source.
            spec = importlib.util.find_spec(module)
            if "pip install 'rollout-buffer[" not in str(error) or spec is None or spec.origin is None:
                raise
            exported = re.search(r"^__all__ = \[(.*?)\]", Path(spec.origin).read_text(), re.MULTILINE | re.DOTALL)
            if exported is None or f'"{name}"' not in exported[1]:
                raise ImportError(f"{module} has no {name}") from error
            return
        if name and not hasattr(imported, name):
            importlib.import_module(f"{module}.{name}")
    elif package not in OPTIONAL and importlib.util.find_spec(package) is None:
        raise ImportError(f"{module} is neither installed nor an optional package")


def test_the_docs_show_python() -> None:
    """The tests above would pass on docs that they cannot read."""
    assert len(BLOCKS) > 30


def test_a_name_that_is_gone_is_noticed() -> None:
    resolve("trainer_client", "Policy")
    with pytest.raises(ImportError):
        resolve("trainer_client", "Polizy")
