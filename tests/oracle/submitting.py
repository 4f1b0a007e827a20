"""Submit: tasks and the feeder's cursor, both or neither."""

from collections.abc import Iterable
from dataclasses import replace

from buffer_service.domain.ops import NewTask, Submit, Submitted
from buffer_service.domain.policy import MAX_ENVIRONMENTS
from buffer_wire.errors import CursorConflict, InvalidField, PendingFull, RunPaused
from tests.oracle.records import Task
from tests.oracle.state import RunState

DRAINING = "draining"


def submit(run: RunState, request: Submit) -> Submitted:
    """Add tasks and move the cursor; a repeat of the last request gets its reply again."""
    run.require_term(request.term)
    if run.paused:
        raise RunPaused(run.run_id, run.paused)
    if run.draining:
        raise RunPaused(run.run_id, DRAINING)
    if run.last_submit is not None and run.last_submit[0] == request.request_id:
        return replace(run.last_submit[1], revision=run.settle())
    if request.expected_cursor != run.cursor:
        raise CursorConflict(request.expected_cursor, run.cursor)
    if len(run.pending) + len(request.tasks) > run.policy.max_pending_tasks:
        raise PendingFull(len(run.pending), run.policy.max_pending_tasks)
    task_ids = _names(run, request)
    run.environments = _environments(run, request)

    for task_id, new in _in_order(run, zip(task_ids, request.tasks, strict=True)):
        task = Task(task_id, run.next_sequence(), priority=new.priority, environment=new.environment, spec=new.spec)
        run.tasks[task_id] = task
        run.make_pending(task, run.now)
    run.cursor = request.cursor
    run.feeder_state = request.feeder_state
    run.changed = True
    reply = Submitted(run.settle(), run.cursor, task_ids, len(run.pending))
    run.last_submit = (request.request_id, reply)
    return reply


def _in_order(run: RunState, named: Iterable[tuple[str, NewTask]]) -> list[tuple[str, NewTask]]:
    """Tasks in the order of their sequences."""
    return sorted(named, key=lambda each: -each[1].expected_tokens if run.policy.longest_first else 0)


def _names(run: RunState, request: Submit) -> list[str]:
    """The tasks' ids, generated from the run's sequence where empty; refuses one that is not new."""
    names: list[str] = []
    taken: set[str] = set()
    for i, new in enumerate(request.tasks):
        name = new.task_id or f"t{run.sequence + 1 + i:08d}"
        if name in run.tasks or name in taken:
            raise InvalidField(f"tasks[{i}].task_id", name, "new to the run")
        taken.add(name)
        names.append(name)
    return names


def _environments(run: RunState, request: Submit) -> set[str]:
    """The run's environments with those of the tasks; refuses one too many."""
    environments = set(run.environments)
    for i, new in enumerate(request.tasks):
        environments.add(new.environment)
        if len(environments) > MAX_ENVIRONMENTS:
            limit = f"one of the run's {MAX_ENVIRONMENTS} environments"
            raise InvalidField(f"tasks[{i}].environment", new.environment, limit)
    return environments
