"""Values of the client are fed by fields of the wire: a field renamed on one side would keep its default unseen."""

from dataclasses import fields

import pytest
from google.protobuf.message import Message

from rollout_buffer.v1 import batches_pb2, runs_pb2, weights_pb2
from trainer_client import state
from trainer_client.batch import BatchInfo

OTHERWISE: dict[type, set[str]] = {
    state.RunState: {"revision", "ledger"},
    BatchInfo: {"staleness_mean", "waited_s"},
}
"""Fields that are not made from the message's field of the same name."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (state.RunState, runs_pb2.Run),
        (state.Engine, weights_pb2.EngineReport),
        (state.TaskFailure, runs_pb2.TaskFailure),
        (state.Resumed, batches_pb2.ResumeResponse),
        (BatchInfo, batches_pb2.BatchInfo),
    ],
)
def test_every_field_of_a_value_has_a_field_of_the_message(kind: type, message: type[Message]) -> None:
    named = {one.name for one in fields(kind)} - OTHERWISE.get(kind, set())
    assert named <= set(message.DESCRIPTOR.fields_by_name)
