"""Tests of what importing the client brings with it. How long it takes is a measurement
(bench/imports.py), not a test.
"""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_client
from buffer_wire import errors

pytestmark = pytest.mark.matrix

EVERYTHING = "import trainer_client.session.session, trainer_client.client.aio, trainer_client.client.assembly"
FIRST_LINES = (
    "from trainer_client import BufferClient, Policy, SamplingParams, Task; BufferClient('127.0.0.1:1').close()"
)

NEVER = (
    "torch", "safetensors", "transformers", "trl", "verifiers", "aiohttp", "structlog", "redis", "pydantic",
    "buffer_service", "rollout_workers",
)  # fmt: skip
LATER = (
    "numpy", "buffer_wire.estimate", "trainer_client.client.aio", "trainer_client.batch", "trainer_client.manifest",
    "trainer_client.progress", "trainer_client.session.session",
)  # fmt: skip


def modules_after(program: str) -> set[str]:
    """Names of the modules that a fresh interpreter has after `program`."""
    program += "\nimport sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(answer.stdout.split())


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [(EVERYTHING, (*NEVER, "trainer_client.publish.files", "http.server")), (FIRST_LINES, NEVER + LATER)],
)
def test_an_import_brings_only_what_it_is_for(program: str, unwanted: tuple[str, ...]) -> None:
    modules = modules_after(program)
    assert "grpc" in modules
    assert not modules & set(unwanted)


def declared() -> dict[str, str]:
    """The public names that type checkers see, with the modules that define them."""
    tree = ast.parse(Path(trainer_client.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    return homes | dict.fromkeys(errors.__all__, errors.__name__)


def test_every_public_name_is_what_type_checkers_take_it_for() -> None:
    homes = declared()
    assert sorted(homes) == sorted(trainer_client.__all__)
    for name, home in homes.items():
        assert getattr(trainer_client, name) is getattr(importlib.import_module(home), name)


def test_every_error_that_a_trainer_may_catch_is_the_packages() -> None:
    assert {error.__name__ for error in errors.by_reason().values()} <= set(trainer_client.__all__)
    assert {"ServiceUnreachable", "PublishFailed", "UsedAfterFork"} <= set(trainer_client.__all__)


def test_the_package_lists_its_public_names_before_they_are_used() -> None:
    program = "import trainer_client; print(*dir(trainer_client))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(trainer_client.__all__) <= set(answer.stdout.split())


def test_a_star_import_gives_every_public_name() -> None:
    space: dict[str, object] = {}
    exec("from trainer_client import *", space)
    assert set(trainer_client.__all__) <= set(space)


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'BufferKlient'"):
        trainer_client.BufferKlient  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'BufferKlient'"):
        exec("from trainer_client import BufferKlient", {})


def test_values_are_pickled_by_the_modules_that_define_them() -> None:
    policy = trainer_client.Policy(batch_groups=2, environments={"math": 3})
    pickled = pickle.dumps(policy)
    assert b"trainer_client.policy" in pickled
    assert pickle.loads(pickled) == policy
