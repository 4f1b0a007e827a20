"""Decoding of the service's replies into plain values."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message

from rollout_buffer.v1 import common_pb2, runs_pb2, weights_pb2
from trainer_client import state
from trainer_client.forks import CALLS
from trainer_client.policy import Policy

if TYPE_CHECKING:
    from buffer_wire.estimate import Estimate

T = TypeVar("T")


def decoded(kind: Callable[..., T], message: Message, **others: object) -> T:
    """Make a value of the dataclass `kind`: `others`, and every other field from the message's field of that name."""
    same = {one.name: getattr(message, one.name) for one in fields(kind) if one.name not in others}  # type: ignore[arg-type]
    return kind(**same, **others)


def weight_version(wire: common_pb2.WeightVersion) -> state.WeightVersion:
    """Decode a weight version."""
    return decoded(state.WeightVersion, wire)


def run_state(run: runs_pb2.Run, revision: int) -> state.RunState:
    """Decode the whole state of a run."""
    return decoded(
        state.RunState,
        run,
        policy=Policy.from_wire(run.policy),
        revision=revision,
        published=weight_version(run.published),
        ledger=state.Ledger(
            _groups(run.groups),
            decoded(state.TaskLedger, run.tasks),
            {entry.environment: _groups(entry.groups) for entry in run.environments},
        ),
        statistics={field.name: getattr(run.statistics, field.name) for field in run.statistics.DESCRIPTOR.fields},
        engines=tuple(map(_engine, run.engines)),
        failures=tuple(decoded(state.TaskFailure, failure) for failure in run.failures),
        estimate=_estimate(run) if run.HasField("estimate") else None,
    )


def _estimate(run: runs_pb2.Run) -> "Estimate":
    with CALLS.under_way():
        from buffer_wire.estimate_messages import estimate_of

    return estimate_of(run.estimate)


def _groups(ledger: runs_pb2.GroupLedger) -> state.GroupLedger:
    entries = [one.name for one in fields(state.GroupLedger) if one.name != "balanced"]
    return decoded(
        state.GroupLedger, ledger, **{name: decoded(state.Amount, getattr(ledger, name)) for name in entries}
    )


def _engine(report: weights_pb2.EngineReport) -> state.Engine:
    return decoded(
        state.Engine,
        report,
        state=weights_pb2.EngineState.Name(report.state).removeprefix("ENGINE_STATE_").lower(),
        loaded=weight_version(report.loaded),
        prepared=weight_version(report.prepared) if report.HasField("prepared") else None,
    )
