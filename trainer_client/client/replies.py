"""Decoding of the service's replies into plain values."""

from typing import TYPE_CHECKING

from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, weights_pb2
from trainer_client import state
from trainer_client.forks import CALLS
from trainer_client.policy import Policy

if TYPE_CHECKING:
    from buffer_wire.estimate import Estimate

_GROUP_ENTRIES = (
    "accepted",
    "queued",
    "forming",
    "delivered",
    "trained",
    "dropped_overflow",
    "dropped_stale",
    "recycled",
    "filtered",
    "discarded",
    "lost",
)


def weight_version(wire: common_pb2.WeightVersion) -> state.WeightVersion:
    """Decode a weight version."""
    return state.WeightVersion(wire.epoch, wire.version)


def run_state(run: runs_pb2.Run, revision: int) -> state.RunState:
    """Decode the whole state of a run."""
    return state.RunState(
        run_id=run.run_id,
        policy=Policy.from_wire(run.policy),
        revision=revision,
        created_ms=run.created_ms,
        epoch=run.epoch,
        published=weight_version(run.published),
        next_step=run.next_step,
        committed_steps=run.committed_steps,
        checkpointed_steps=run.checkpointed_steps,
        world_size=run.world_size,
        cursor=run.cursor,
        paused=run.paused,
        draining=run.draining,
        ledger=_ledger(run),
        statistics={field.name: getattr(run.statistics, field.name) for field in run.statistics.DESCRIPTOR.fields},
        engines=tuple(_engine(engine) for engine in run.engines),
        failures=tuple(state.TaskFailure(f.task_id, f.attempts, f.error, f.time_ms) for f in run.failures),
        estimate=_estimate(run) if run.HasField("estimate") else None,
    )


def _estimate(run: runs_pb2.Run) -> "Estimate":
    with CALLS.under_way():
        from buffer_wire.estimate_messages import estimate_of

    return estimate_of(run.estimate)


def _groups(ledger: runs_pb2.GroupLedger) -> state.GroupLedger:
    amounts = {
        name: state.Amount(entry.groups, entry.samples, entry.tokens, entry.bytes)
        for name in _GROUP_ENTRIES
        for entry in (getattr(ledger, name),)
    }
    return state.GroupLedger(**amounts, balanced=ledger.balanced)


def _ledger(run: runs_pb2.Run) -> state.Ledger:
    tasks = run.tasks
    return state.Ledger(
        _groups(run.groups),
        state.TaskLedger(
            submitted=tasks.submitted,
            pending=tasks.pending,
            leased=tasks.leased,
            completed=tasks.completed,
            failed=tasks.failed,
            cancelled=tasks.cancelled,
            balanced=tasks.balanced,
        ),
        {entry.environment: _groups(entry.groups) for entry in run.environments},
    )


def _engine(report: weights_pb2.EngineReport) -> state.Engine:
    return state.Engine(
        engine_id=report.engine_id,
        worker_id=report.worker_id,
        state=weights_pb2.EngineState.Name(report.state).removeprefix("ENGINE_STATE_").lower(),
        loaded=weight_version(report.loaded),
        reloads=report.reloads,
        last_reload_ms=report.last_reload_ms,
        last_error=report.last_error,
        errors=report.errors,
        membership=report.membership,
        prepared=weight_version(report.prepared) if report.HasField("prepared") else None,
        weights_url=report.weights_url,
        silent_ms=report.silent_ms,
        decoded_tokens=report.decoded_tokens,
        decode_busy_ms=report.decode_busy_ms,
        decode_request_ms=report.decode_request_ms,
    )


def resumed(reply: batches_pb2.ResumeResponse) -> state.Resumed:
    """Decode the result of a resume: the place where the trainer goes on."""
    return state.Resumed(
        epoch=reply.epoch,
        next_step=reply.next_step,
        next_unassembled_step=reply.next_unassembled_step,
        version=reply.version,
        cursor=reply.cursor,
        feeder_state=reply.feeder_state,
    )
