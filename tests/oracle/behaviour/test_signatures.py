import inspect
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain.command import Command
from buffer_service.domain.ports import RunStore
from tests.oracle import ReferenceModel

# Looks into a run have no model: tests/store/inspect compares them with what was put in.
LOOKS = {"list_groups", "list_steps", "list_tasks", "read_payload", "task", "waits"}
NOT_OF_ONE_RUN = {"call", "close", "facts", "payload_place", "sweep"}
# Who may come to the store, and who relays: tests/store/test_users.py.
OF_ACCESS = {"note_client", "payload_user"}
# Payloads part by part, for who cannot reach the store: tests/service/test_parts.py.
OF_PARTS = {"read_part", "write_part"}
# Images of tasks, on which no decision depends: tests/service/test_images.py.
OF_BLOBS = {"read_blob", "write_blob"}
# Two operations of the model in one call: tests/service/test_pulls_that_commit.py.
JOINED = {"commit_and_checkpoint"}
# What a controller's decision is made of, which the model is handed: tests/store/test_steering.py.
OF_STEERING = {"situation"}


def functions(of: Any) -> set[str]:
    """Names of the functions of a module or class."""
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize("operation", sorted(functions(RunStore) - LOOKS - NOT_OF_ONE_RUN - OF_ACCESS - OF_PARTS))
def test_the_model_has_the_operation_of_the_port(operation: str) -> None:
    assert inspect.signature(getattr(ReferenceModel, operation)) == inspect.signature(getattr(RunStore, operation))


@pytest.mark.parametrize("operation", sorted(functions(commands) - LOOKS - OF_ACCESS - OF_BLOBS - JOINED - OF_STEERING))
def test_the_model_has_the_operation_of_the_command(operation: str) -> None:
    modelled = inspect.signature(getattr(ReferenceModel, operation))
    commanded = inspect.signature(getattr(commands, operation))
    parameters = [one for one in commanded.parameters.values() if one.name != "portion"]
    assert list(modelled.parameters.values())[1:] == parameters
    assert Command[modelled.return_annotation] == commanded.return_annotation  # type: ignore[name-defined]
