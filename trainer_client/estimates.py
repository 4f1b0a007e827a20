"""Estimates of the service as plain values. The messages have the fields of the dataclasses, by the same names."""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from rollout_buffer.v1 import runs_pb2 as pb
from trainer_client import estimate

Value = TypeVar("Value")

_KINDS: dict[str, type] = {
    message.DESCRIPTOR.full_name: kind
    for message, kind in (
        (pb.StalenessAdvice, estimate.Advice),
        (pb.SamplingBias, estimate.Bias),
        (pb.BiasComparison, estimate.Comparison),
        (pb.EnvironmentStaleness, estimate.EnvironmentStaleness),
        (pb.MeasuredStaleness, estimate.Measured),
        (pb.PredictedStaleness, estimate.Predicted),
        (pb.EstimatedQuantities, estimate.Quantities),
        (pb.UnknownQuantity, estimate.Unknown),
        (pb.StalenessVerdict, estimate.Verdict),
    )
}


def estimate_of(message: pb.RunEstimate) -> estimate.Estimate:
    """The values of an estimate; what is unset is None."""
    return _of(estimate.Estimate, message)


def _of(kind: type[Value], message: Message) -> Value:
    return kind(**{field.name: _field(message, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _field(message: Message, name: str) -> Any:  # noqa: ANN401 - of any type that a field has
    descriptor, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if descriptor.message_type is not None:
        kind = _KINDS[descriptor.message_type.full_name]
        return _of(kind, value) if isinstance(value, Message) else tuple(_of(kind, one) for one in value)
    if not isinstance(value, (str, int, float)):
        return tuple(value)
    return None if descriptor.has_presence and not message.HasField(name) else value
