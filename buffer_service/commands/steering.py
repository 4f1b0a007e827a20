"""Commands of the controller of staleness: what it decides from, and its decision."""

from typing import Any

from buffer_service.commands.replies import pack
from buffer_service.commands.run_view import as_decision, as_policy, as_snapshot
from buffer_service.domain.command import Command, Fields
from buffer_service.domain.steering.decisions import Decision, Situation


def situation(run_id: str) -> Command[Situation | None]:
    """Situation to decide from; None: the run has no target."""
    return Command(run_id, "situation", pack(), _situation, reads=True, acknowledges=False)


def decide(run_id: str, decision: Decision) -> Command[bool]:
    """Keep a decision, and have its knobs in effect. False: one was made for that publish, or there is a newer one."""
    knobs = decision.knobs
    lowered = (knobs.micro_batch_groups, knobs.max_queued_groups, knobs.lookahead_milli, knobs.max_inflight_groups)
    said: tuple[Any, ...] = (
        decision.version,
        decision.moved_at,
        decision.moves,
        decision.pace_milli,
        decision.target_milli,
        int(decision.by_token),
        decision.outcome.value,
        decision.measured_milli,
        decision.reason,
    )
    return Command(run_id, "decide", pack(decision.version, pack(*said, *lowered), lowered), _decided)


def _situation(_tag: str, fields: Fields) -> Situation | None:
    policy, *fields = fields
    if not fields:
        return None
    version, world_size, decision, held, snapshots = fields
    return Situation(
        policy=as_policy(policy),
        world_size=world_size,
        version=version,
        decided=as_decision(decision),
        snapshots=[as_snapshot(one) for one in snapshots],
        held_at=held,
    )


def _decided(_tag: str, fields: Fields) -> bool:
    return bool(fields[0])
