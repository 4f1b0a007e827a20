"""The state of a run, to the wire and back."""

from dataclasses import replace

from buffer_service.domain import ops
from buffer_service.domain.gate import MILLI
from buffer_service.domain.policy import UNSET
from buffer_service.domain.steering.decisions import NO_DECISION, Decision, Outcome
from buffer_service.domain.steering.knobs import Knobs, lookahead_milli
from buffer_service.observability.forecasts import FORECASTS
from buffer_service.observability.ledgers import balanced, tasks_balanced
from buffer_service.rpc.convert.policies import policy, to_policy
from buffer_service.rpc.convert.weights import to_report
from buffer_service.rules.transitions import GroupState, TaskState
from buffer_wire.enums import word
from buffer_wire.messages import message_of, value_of
from rollout_buffer.v1 import runs_pb2 as pb

_DISPOSITIONS = ("accepted", *GroupState)
_TASKS = ("submitted", *TaskState)


def to_run(view: ops.RunView) -> pb.Run:
    """The message of a run's whole state."""
    return message_of(
        pb.Run,
        view,
        policy=to_policy(view.policy),
        groups=_to_group_ledger(view.groups),
        environments=[
            pb.EnvironmentLedger(environment=name, groups=_to_group_ledger(ledger))
            for name, ledger in sorted(view.environments.items())
        ],
        tasks=pb.TaskLedger(**{name: view.tasks.get(name, 0) for name in _TASKS}, balanced=tasks_balanced(view)),
        statistics=pb.RunStatistics(**view.statistics),
        engines=[to_report(report) for report in view.engines],
        estimate=message_of(pb.RunEstimate, FORECASTS.estimate(view)),
        control=_to_control(view),
    )


def _to_control(view: ops.RunView) -> pb.StalenessControl | None:
    decided, in_effect = view.decision, view.in_effect
    if decided == NO_DECISION or not view.policy.target_staleness_milli:
        return None
    ahead = lookahead_milli(view.policy, decided.knobs)
    return message_of(
        pb.StalenessControl,
        decided,
        measured=None if decided.measured_milli == UNSET else decided.measured_milli / MILLI,
        max_lookahead=None if ahead == UNSET else ahead / MILLI,
        micro_batch_groups=in_effect.micro_batch_groups,
        max_queued_groups=in_effect.max_queued_groups,
        max_inflight_groups=in_effect.max_inflight_groups,
    )


def _decision(run: pb.Run) -> Decision:
    """The controller's decision, whose knobs are all that is in effect."""
    if not run.HasField("control"):
        return NO_DECISION
    said = run.control
    return value_of(
        Decision,
        said,
        target_milli=run.policy.target_staleness_milli,
        by_token=run.policy.target_measure == pb.TARGET_MEASURE_TOKEN,
        outcome=Outcome(word(pb.ControlOutcome, said.outcome)),
        measured_milli=round(said.measured * MILLI) if said.HasField("measured") else UNSET,
        knobs=Knobs(
            micro_batch_groups=said.micro_batch_groups,
            max_queued_groups=said.max_queued_groups,
            lookahead_milli=round(said.max_lookahead * MILLI) if said.HasField("max_lookahead") else UNSET,
            max_inflight_groups=said.max_inflight_groups,
        ),
    )


def _to_group_ledger(ledger: dict[str, ops.Amount]) -> pb.GroupLedger:
    entries = {name: message_of(pb.Amount, ledger.get(name, ops.Amount())) for name in _DISPOSITIONS}
    return pb.GroupLedger(**entries, balanced=balanced(ledger))


def view_of(run: pb.Run, revision: int = 0) -> ops.RunView:
    """The inverse of `to_run`, for programs that show a run; its window stays behind, of which the message has the
    estimate. Raises InvalidField, InvalidPolicy for a newer service.
    """
    effective = pb.RunPolicy()
    effective.CopyFrom(run.policy)
    # What it left unset is unset, whatever the preset says.
    effective.preset = ""
    return value_of(
        ops.RunView,
        run,
        policy=replace(policy(effective), preset=run.policy.preset),
        revision=revision,
        # An older service does not say.
        published_steps=run.published_steps if run.HasField("published_steps") else run.committed_steps,
        groups=_ledger(run.groups),
        environments={entry.environment: _ledger(entry.groups) for entry in run.environments},
        tasks={name: getattr(run.tasks, name) for name in _TASKS},
        decision=_decision(run),
        statistics={field.name: getattr(run.statistics, field.name) for field in pb.RunStatistics.DESCRIPTOR.fields},
    )


def _ledger(message: pb.GroupLedger) -> dict[str, ops.Amount]:
    return {name: value_of(ops.Amount, getattr(message, name)) for name in _DISPOSITIONS}
