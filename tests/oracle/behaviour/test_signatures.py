import inspect

import pytest

from buffer_service.domain.inspection import InspectStore
from buffer_service.domain.ports import RunStore
from tests.oracle import ReferenceModel

NOT_OF_ONE_RUN = {"notifications", "sweep", "close", "facts"}


def operations(port: type) -> set[str]:
    """Names of a port's methods."""
    return {name for name, _ in inspect.getmembers(port, inspect.isfunction) if not name.startswith("_")}


# Looks into a run have no model: tests/store/inspect compares them with what was put in.
OF_THE_MODEL = sorted(operations(RunStore) - operations(InspectStore) - NOT_OF_ONE_RUN)


@pytest.mark.parametrize("operation", OF_THE_MODEL)
def test_the_model_has_the_operation_of_the_port(operation: str) -> None:
    assert inspect.signature(getattr(ReferenceModel, operation)) == inspect.signature(getattr(RunStore, operation))
