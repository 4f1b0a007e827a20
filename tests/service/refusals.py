"""Refusals: what every test of a refusal asserts, and the report of an engine."""

from collections.abc import Callable
from typing import Any

from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import common_pb2, weights_pb2
from tests.support.rpc import RunRpc, failure


def refused(run: RunRpc, call: Callable[[], object], reason: str, **attributes: str) -> RolloutBufferError:
    """`call` fails with `reason` and these attributes, and the run stays as it is."""
    before = run.get()
    error = failure(call)
    assert error.reason == reason, error
    for name, value in attributes.items():
        assert error.attributes[name] == value
    assert run.get() == before
    return error


def engine_report(**fields: Any) -> weights_pb2.EngineReport:
    values: dict[str, Any] = {
        "engine_id": "engine-0",
        "worker_id": "worker",
        "state": weights_pb2.ENGINE_STATE_READY,
        "loaded": common_pb2.WeightVersion(term=1),
        **fields,
    }
    return weights_pb2.EngineReport(**values)
