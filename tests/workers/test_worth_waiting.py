"""Tests of which errors a worker sits out."""

import grpc
import pytest

from buffer_wire.errors import InvalidField, RolloutBufferError, RunPaused, StoreRolledBack, UnknownRun
from buffer_wire.status import error_of
from rollout_workers.service.client import worth_waiting


@pytest.mark.parametrize(
    "error",
    [
        error_of(grpc.StatusCode.UNAVAILABLE, "connection refused", None),
        # A server that shuts down cancels what it was doing.
        error_of(grpc.StatusCode.CANCELLED, "shutting down", None),
        RunPaused("r", "operator"),
        StoreRolledBack("r", 2, 1),
        UnknownRun("r"),
    ],
)
def test_what_ends_by_itself_or_by_a_trainer_is_waited_out(error: RolloutBufferError) -> None:
    assert worth_waiting(error)


@pytest.mark.parametrize(
    "error",
    [
        error_of(grpc.StatusCode.INTERNAL, "broken", None),
        error_of(grpc.StatusCode.PERMISSION_DENIED, "no", None),
        InvalidField("worker_id", "", "a name"),
    ],
)
def test_what_no_repeat_can_mend_ends_the_worker(error: RolloutBufferError) -> None:
    assert not worth_waiting(error)
