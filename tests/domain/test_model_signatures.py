import inspect

import pytest

from buffer_service.domain.model import ReferenceModel
from buffer_service.domain.ports import RunStore

NOT_OF_ONE_RUN = {"notifications", "sweep", "close", "facts"}
# They change nothing; tests/store/inspect compares them with what was put in.
LOOKS = {"list_groups", "list_steps", "list_tasks", "read_payload", "task", "waits"}
OPERATIONS = sorted(name for name, _ in inspect.getmembers(RunStore, inspect.isfunction) if not name.startswith("_"))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in NOT_OF_ONE_RUN | LOOKS])
def test_the_model_has_the_operation_of_the_port(operation: str) -> None:
    assert inspect.signature(getattr(ReferenceModel, operation)) == inspect.signature(getattr(RunStore, operation))
