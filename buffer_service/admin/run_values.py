"""A run as the admin page's JSON: in short for lists, and whole."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from buffer_service.domain.evaluations import EvaluationView
from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import RunPolicy
from buffer_service.observability.control import lowered, target
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_service.observability.filters import filtered, passed_over, recent_acceptance, starved
from buffer_service.observability.forecasts import FORECASTS
from buffer_service.observability.ledgers import groups_balanced, tasks_balanced
from buffer_service.observability.relaying import relaying


def in_short(view: RunView) -> dict[str, Any]:
    """Summary of a run, for the list of runs."""
    return {
        "run_id": view.run_id,
        "term": view.term,
        "published_version": view.published.version,
        "next_step": view.next_step,
        "committed_steps": view.committed_steps,
        "queued_groups": view.groups["queued"].groups,
        "batch_groups": view.policy.batch_groups,
        "pending_tasks": view.tasks["pending"],
        "leased_tasks": view.tasks["leased"],
        "queued_by_environment": {name: ledger["queued"].groups for name, ledger in view.environments.items()},
        "filtered_groups": filtered(view),
        "recent_acceptance": recent_acceptance(view),
        "filter_starves": starved(view),
        "paused": view.paused,
        "draining": view.draining,
        "waits_on": waits_on(Situation.of(view)),
    }


def whole(view: RunView, evaluations: Sequence[EvaluationView]) -> dict[str, Any]:
    """The view of a run as JSON values, with values derived from it."""
    return {
        **asdict(view),
        "policy_changed": policy_changed(view.policy),
        "groups_balanced": groups_balanced(view),
        "tasks_balanced": tasks_balanced(view),
        "filter_starves": starved(view),
        "waits_on": waits_on(Situation.of(view)),
        "relayed": relaying(view),
        "passed_over": passed_over(view),
        "target": target(view),
        "lowered": lowered(view),
        "estimate": asdict(FORECASTS.estimate(view)),
        "evaluations": [asdict(evaluation) for evaluation in evaluations],
    }


def policy_changed(policy: RunPolicy) -> list[str]:
    """Names of the fields that are not as in a policy of the same batch_groups with nothing else given."""
    plain = RunPolicy(batch_groups=policy.batch_groups)
    named = [field.name for field in fields(policy) if getattr(policy, field.name) != getattr(plain, field.name)]
    return named if policy.batch_groups == RunPolicy().batch_groups else ["batch_groups", *named]
