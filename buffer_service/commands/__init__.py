"""Commands: the operations on a run as values, by name; see domain/command.py."""

from buffer_service.commands.batches import (
    checkpoint,
    commit,
    commit_and_checkpoint,
    pull,
    reject,
    report_lost,
    resume,
)
from buffer_service.commands.evaluating import (
    delete_evaluation,
    evaluation,
    evaluation_results,
    evaluations,
    submit_evaluation,
)
from buffer_service.commands.groups import abandon_push
from buffer_service.commands.inspection import list_groups, list_steps, list_tasks, task
from buffer_service.commands.publishing import plan_collective, publish, report_engine, weights
from buffer_service.commands.runs import continue_run, drain_run, note_client, pause_run, update_policy, view
from buffer_service.commands.steering import decide, situation
from buffer_service.commands.tasks import extend, give_back, lease_groups, read_blob, submit, write_blob

__all__ = [
    "abandon_push",
    "checkpoint",
    "commit",
    "commit_and_checkpoint",
    "continue_run",
    "decide",
    "delete_evaluation",
    "drain_run",
    "evaluation",
    "evaluation_results",
    "evaluations",
    "extend",
    "give_back",
    "lease_groups",
    "list_groups",
    "list_steps",
    "list_tasks",
    "note_client",
    "pause_run",
    "plan_collective",
    "publish",
    "pull",
    "read_blob",
    "reject",
    "report_engine",
    "report_lost",
    "resume",
    "situation",
    "submit",
    "submit_evaluation",
    "task",
    "update_policy",
    "view",
    "weights",
    "write_blob",
]
