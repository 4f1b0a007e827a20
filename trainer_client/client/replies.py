"""Decoding of the service's replies into plain values."""

from typing import TYPE_CHECKING

from buffer_wire.messages import value_of
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2
from trainer_client import state
from trainer_client.forks import CALLS
from trainer_client.policy import Policy

if TYPE_CHECKING:
    from buffer_wire.estimate import Estimate


def weight_version(wire: common_pb2.WeightVersion) -> state.WeightVersion:
    """Decode a weight version."""
    return value_of(state.WeightVersion, wire)


def run_state(run: runs_pb2.Run, revision: int) -> state.RunState:
    """Decode the whole state of a run."""
    return value_of(
        state.RunState,
        run,
        policy=Policy.from_wire(run.policy),
        revision=revision,
        ledger=state.Ledger(
            value_of(state.GroupLedger, run.groups),
            value_of(state.TaskLedger, run.tasks),
            {entry.environment: value_of(state.GroupLedger, entry.groups) for entry in run.environments},
        ),
        statistics={field.name: getattr(run.statistics, field.name) for field in run.statistics.DESCRIPTOR.fields},
        estimate=_estimate(run) if run.HasField("estimate") else None,
        control=value_of(state.StalenessControl, run.control) if run.HasField("control") else None,
    )


def rejected(reply: batches_pb2.RejectResponse) -> state.Rejected:
    """Decode how a step stands after a rejection."""
    with CALLS.under_way():
        from trainer_client.batch import BatchInfo

    wire = reply.batch
    info = value_of(BatchInfo, wire, staleness_mean=wire.staleness_mean_milli / 1000, waited_s=0.0)
    return state.Rejected(reply.rejected_groups, reply.missing_groups, info)


def _estimate(run: runs_pb2.Run) -> "Estimate":
    with CALLS.under_way():
        from buffer_wire.estimate import Estimate

    return value_of(Estimate, run.estimate)
