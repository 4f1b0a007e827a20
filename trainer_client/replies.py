"""Replies of the service as plain values, and a pull stream put together to a batch."""

import time

from buffer_wire.codec import Delivered, MalformedMessage, split_pull
from buffer_wire.estimate_messages import estimate_of
from buffer_wire.revisions import Revisions
from buffer_wire.status import ServiceUnreachable
from rollout_buffer.v1 import batches_pb2, common_pb2, runs_pb2, weights_pb2
from trainer_client import state
from trainer_client.batch import Batch, BatchInfo, Group
from trainer_client.policy import Policy

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
    """Identity of weights."""
    return state.WeightVersion(wire.epoch, wire.version)


def run_state(run: runs_pb2.Run, revision: int) -> state.RunState:
    """The whole state of a run."""
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
        estimate=estimate_of(run.estimate) if run.HasField("estimate") else None,
    )


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
    """Where to go on."""
    return state.Resumed(
        epoch=reply.epoch,
        next_step=reply.next_step,
        next_unassembled_step=reply.next_unassembled_step,
        version=reply.version,
        cursor=reply.cursor,
        feeder_state=reply.feeder_state,
    )


class PullAssembly:
    """One attempt of a pull: takes the stream's messages as bytes and keeps them, undivided, behind the batch."""

    def __init__(self, run_id: str, revisions: Revisions, started: float) -> None:
        self._run_id = run_id
        self._revisions = revisions
        self._started = started
        self._info: batches_pb2.BatchInfo | None = None
        self._groups: list[Delivered] = []
        self._received_bytes = 0

    def add(self, message: bytes) -> None:
        """The next message. Raises MalformedMessage."""
        revision, info, groups = split_pull(message)
        self._revisions.note(self._run_id, revision)
        if info is not None:
            self._info = info
        self._groups.extend(groups)
        self._received_bytes += len(message)

    def finish(self) -> Batch:
        """The batch, after the stream's regular end. Raises ServiceUnreachable (retryable) if the stream was cut."""
        info = self._info
        if info is None or len(self._groups) != info.shard_groups:
            wanted = "no batch facts" if info is None else f"{len(self._groups)} of {info.shard_groups} groups"
            raise ServiceUnreachable(f"the pull stream ended early, with {wanted}", status="CUT")
        groups = tuple(Group.of(delivered, info.train_version) for delivered in self._groups)
        facts = BatchInfo(
            step=info.step,
            train_version=info.train_version,
            total_groups=info.total_groups,
            total_samples=info.total_samples,
            total_tokens=info.total_tokens,
            total_loss_tokens=info.total_loss_tokens,
            shard_groups=info.shard_groups,
            shard_tokens=info.shard_tokens,
            staleness_mean=info.staleness_mean_milli / 1000,
            staleness_max=info.staleness_max,
            replayed=info.replayed,
            queued_groups=info.queued_groups,
            waited_s=time.monotonic() - self._started,
            round=info.round,
            final=info.final,
        )
        return Batch(facts, groups, self._received_bytes)


__all__ = ["MalformedMessage", "PullAssembly", "resumed", "run_state", "weight_version"]
