"""The state of a run, to the wire and back."""

from dataclasses import replace

from buffer_service.domain import ops
from buffer_service.observability.estimate import estimate
from buffer_service.observability.ledgers import balanced, tasks_balanced
from buffer_service.rpc.convert.fields import to_version
from buffer_service.rpc.convert.policies import policy, to_policy
from buffer_service.rpc.convert.weights import stored_report, to_report
from buffer_service.rules.transitions import GroupState, TaskState
from buffer_wire.estimate_messages import to_estimate
from rollout_buffer.v1 import runs_pb2 as pb

_DISPOSITIONS = ("accepted", *GroupState)
_TASKS = ("submitted", *TaskState)


def to_run(view: ops.RunView) -> pb.Run:
    """The message of a run's whole state."""
    return pb.Run(
        run_id=view.run_id,
        policy=to_policy(view.policy),
        created_ms=view.created_ms,
        epoch=view.epoch,
        published=to_version(view.published),
        next_step=view.next_step,
        committed_steps=view.committed_steps,
        published_steps=view.published_steps,
        checkpointed_steps=view.checkpointed_steps,
        world_size=view.world_size,
        cursor=view.cursor,
        paused=view.paused,
        draining=view.draining,
        groups=_to_group_ledger(view.groups),
        environments=[
            pb.EnvironmentLedger(environment=name, groups=_to_group_ledger(ledger))
            for name, ledger in sorted(view.environments.items())
        ],
        tasks=_to_task_ledger(view),
        statistics=pb.RunStatistics(**view.statistics),
        engines=[to_report(report) for report in view.engines],
        failures=[
            pb.TaskFailure(task_id=f.task_id, attempts=f.attempts, error=f.error, time_ms=f.time_ms)
            for f in view.failures
        ],
        estimate=to_estimate(estimate(view)),
    )


def _to_group_ledger(ledger: dict[str, ops.Amount]) -> pb.GroupLedger:
    entries = {name: _to_amount(ledger.get(name, ops.Amount())) for name in _DISPOSITIONS}
    return pb.GroupLedger(**entries, balanced=balanced(ledger))


def _to_task_ledger(view: ops.RunView) -> pb.TaskLedger:
    return pb.TaskLedger(**{name: view.tasks.get(name, 0) for name in _TASKS}, balanced=tasks_balanced(view))


def _to_amount(amount: ops.Amount) -> pb.Amount:
    return pb.Amount(groups=amount.groups, samples=amount.samples, tokens=amount.tokens, bytes=amount.bytes)


def view_of(run: pb.Run, revision: int = 0) -> ops.RunView:
    """The inverse of `to_run`, for programs that show a run; its window stays behind, of which the message has the
    estimate. Raises InvalidField, InvalidPolicy for a newer service.
    """
    effective = pb.RunPolicy()
    effective.CopyFrom(run.policy)
    # What it left unset is unset, whatever the preset says.
    effective.preset = ""
    return ops.RunView(
        run_id=run.run_id,
        policy=replace(policy(effective), preset=run.policy.preset),
        revision=revision,
        created_ms=run.created_ms,
        epoch=run.epoch,
        published=ops.WeightVersion(run.published.epoch, run.published.version),
        next_step=run.next_step,
        committed_steps=run.committed_steps,
        # An older service does not say.
        published_steps=run.published_steps if run.HasField("published_steps") else run.committed_steps,
        checkpointed_steps=run.checkpointed_steps,
        world_size=run.world_size,
        cursor=run.cursor,
        paused=run.paused,
        draining=run.draining,
        groups=_ledger(run.groups),
        environments={entry.environment: _ledger(entry.groups) for entry in run.environments},
        tasks={name: getattr(run.tasks, name) for name in _TASKS},
        statistics={field.name: getattr(run.statistics, field.name) for field in pb.RunStatistics.DESCRIPTOR.fields},
        engines=[stored_report(report) for report in run.engines],
        failures=[ops.TaskFailure(f.task_id, f.attempts, f.error, f.time_ms) for f in run.failures],
    )


def _ledger(message: pb.GroupLedger) -> dict[str, ops.Amount]:
    return {name: _amount(getattr(message, name)) for name in _DISPOSITIONS}


def _amount(message: pb.Amount) -> ops.Amount:
    return ops.Amount(message.groups, message.samples, message.tokens, message.bytes)
