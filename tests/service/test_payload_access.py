"""Access to the store for clients that write and read payloads themselves, on a real service."""

from collections.abc import Callable
from typing import Any

import pytest

from rollout_buffer.v1 import common_pb2, payloads_pb2
from tests.service.refusals import refused
from tests.support.rpc import Rpc, RunRpc, failure

Ask = Callable[[payloads_pb2.PayloadAccessRequest], payloads_pb2.PayloadAccess]


@pytest.fixture(params=["GetWriteAccess", "GetReadAccess"])
def ask(request: pytest.FixtureRequest, rpc: Rpc) -> Ask:
    method: Ask = getattr(rpc.payloads, request.param)
    return method


def request_of(run: RunRpc, **fields: Any) -> payloads_pb2.PayloadAccessRequest:
    return payloads_pb2.PayloadAccessRequest(run=run.ref, **{"client_id": "worker-1", **fields})


def test_there_is_no_access_to_a_run_that_does_not_exist(ask: Ask) -> None:
    unknown = payloads_pb2.PayloadAccessRequest(run=common_pb2.RunRef(run_id="nobodys"), client_id="worker-1")
    assert failure(lambda: ask(unknown)).reason == "unknown_run"


@pytest.mark.parametrize(
    ("field", "value"),
    [("client_id", ""), ("client_id", "x" * 129), ("client_id", "a\nb"), ("trouble", "x" * 513)],
)
def test_a_request_out_of_bounds_is_refused_by_the_fields_name(rpc: Rpc, ask: Ask, field: str, value: str) -> None:
    run = rpc.create()
    refused(run, lambda: ask(request_of(run, **{field: value})), "invalid_field", field=field)
