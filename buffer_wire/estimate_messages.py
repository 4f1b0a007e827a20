"""Estimates, to the wire and back. The messages have the fields of the dataclasses, by the same names."""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from buffer_wire import estimate as values
from rollout_buffer.v1 import runs_pb2 as pb

Value = TypeVar("Value")

_MESSAGES: dict[type, type[Message]] = {
    values.Advice: pb.StalenessAdvice,
    values.Bias: pb.SamplingBias,
    values.Comparison: pb.BiasComparison,
    values.EnvironmentStaleness: pb.EnvironmentStaleness,
    values.Estimate: pb.RunEstimate,
    values.Measured: pb.MeasuredStaleness,
    values.Predicted: pb.PredictedStaleness,
    values.Quantities: pb.EstimatedQuantities,
    values.Unknown: pb.UnknownQuantity,
    values.Verdict: pb.StalenessVerdict,
}
_KINDS = {message.DESCRIPTOR.full_name: kind for kind, message in _MESSAGES.items()}


def to_estimate(estimate: values.Estimate) -> pb.RunEstimate:
    """The message of an estimate; what is None is left unset."""
    message: pb.RunEstimate = _to_wire(estimate)
    return message


def estimate_of(message: pb.RunEstimate) -> values.Estimate:
    """The inverse of `to_estimate`."""
    return _of_wire(values.Estimate, message)


def _to_wire(value: Any) -> Any:  # noqa: ANN401 - any of the dataclasses, or what their fields hold
    if isinstance(value, tuple):
        return [_to_wire(one) for one in value]
    message = _MESSAGES.get(type(value))
    if message is None:
        return value
    set_fields = ((field.name, getattr(value, field.name)) for field in fields(value))
    return message(**{name: _to_wire(one) for name, one in set_fields if one is not None})


def _of_wire(kind: type[Value], message: Message) -> Value:
    return kind(**{field.name: _field(message, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _field(message: Message, name: str) -> Any:  # noqa: ANN401 - of any type that a field has
    descriptor, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if descriptor.message_type is not None:
        kind = _KINDS[descriptor.message_type.full_name]
        return _of_wire(kind, value) if isinstance(value, Message) else tuple(_of_wire(kind, one) for one in value)
    if not isinstance(value, (str, int, float)):
        return tuple(value)
    return None if descriptor.has_presence and not message.HasField(name) else value
