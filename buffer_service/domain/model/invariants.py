"""The invariants that can be seen in one state of a run.

Both ledgers balance and agree with what exists; a task has at most one live lease, and one exactly while it is
leased; no group is in two places; no stored batch was assembled with a group staler than max_staleness; progress marks
are in order and every step between the freed and the next one is stored; what is kept has its payload. (Caps are not
here: a policy that lowers one takes effect with the next push.)
"""

from collections import Counter
from collections.abc import Iterator

from buffer_service.domain.model.records import Group
from buffer_service.domain.model.state import RunState
from buffer_service.domain.model.view import existing_groups
from buffer_service.domain.policy import UNSET
from buffer_service.domain.transitions import GroupState, TaskState


class BrokenInvariant(RuntimeError):
    """The state contradicts a rule: a defect of the rules."""


def check(run: RunState) -> None:
    """Raise BrokenInvariant with every contradiction that is found."""
    found = [*_ledgers(run), *_queue(run), *_tasks(run), *_batches(run), *_progress(run), *_payloads(run)]
    if found:
        raise BrokenInvariant(f"run {run.run_id}: " + "; ".join(found))


def _ledgers(run: RunState) -> Iterator[str]:
    if not run.group_ledger.balanced():
        yield f"group ledger does not balance: {run.group_ledger.entries()}"
    if not run.task_ledger.balanced():
        yield f"task ledger does not balance: {run.task_ledger.entries()}"
    for state, amount in existing_groups(run).items():
        if amount != run.group_ledger.states[state]:
            yield f"{amount} {state} groups exist, the ledger has {run.group_ledger.states[state]}"
    for state, number in {TaskState.PENDING: len(run.pending), TaskState.LEASED: len(run.leases)}.items():
        if number != run.task_ledger.states[state]:
            yield f"{number} {state} tasks exist, the ledger has {run.task_ledger.states[state]}"


def _queue(run: RunState) -> Iterator[str]:
    sums = sum(g.facts.tokens for g in run.queue), sum(g.facts.size_bytes for g in run.queue)
    if sums != (run.queue.tokens, run.queue.bytes):
        yield f"queue sums are {(run.queue.tokens, run.queue.bytes)}, its groups have {sums}"


def _tasks(run: RunState) -> Iterator[str]:
    for task in run.tasks.values():
        leased, pending = task.state == TaskState.LEASED, task.state == TaskState.PENDING
        if leased != (task.lease is not None) or leased != (run.leases.tasks.get(task.task_id) is task):
            yield f"task {task.task_id} is {task.state} with lease {task.lease}"
        if pending != (task in run.pending):
            yield f"task {task.task_id} is {task.state}, yet in or out of the pending ones"
        if (task.state == TaskState.COMPLETED) != (task.accepted_attempt is not None):
            yield f"task {task.task_id} is {task.state} with accepted attempt {task.accepted_attempt}"
        if task.continuation is not None and not task.is_open:
            yield f"task {task.task_id} is {task.state} and keeps a continuation"
        if task.lease is not None and task.task_id not in run.leases.workers[task.lease.worker_id].leased:
            yield f"task {task.task_id} is leased to {task.lease.worker_id}, who does not hold it"
    held = Counter(task_id for worker in run.leases.workers.values() for task_id in worker.leased)
    if held != Counter(run.leases.tasks.keys()):
        yield f"workers hold {dict(held)}, leased are {sorted(run.leases.tasks)}"


def _batches(run: RunState) -> Iterator[str]:
    places = Counter(group.group_id for group in run.queue)
    for step in run.steps.values():
        places.update(group.group_id for group in step.groups)
        staler = max(step.staleness.values(), default=0)
        if step.max_staleness != UNSET and staler > step.max_staleness:
            yield f"step {step.step} holds a group of staleness {staler} above {step.max_staleness}"
        if step.staleness.keys() != {group.group_id for group in step.groups}:
            yield f"step {step.step} holds other groups than those it was assembled from"
        expected = GroupState.TRAINED if step.step < run.committed_steps else GroupState.DELIVERED
        if any(group.state != expected for group in step.groups):
            yield f"step {step.step} holds groups that are not {expected}"
    if any(number > 1 for number in places.values()):
        yield f"groups are in two places: {[name for name, number in places.items() if number > 1]}"
    if any(group.state != GroupState.QUEUED for group in run.queue):
        yield "groups are in the queue that are not queued"


def _progress(run: RunState) -> Iterator[str]:
    marks = (run.checkpointed_steps, run.committed_steps, run.next_step)
    if not (0 <= marks[0] <= marks[1] <= marks[2]):
        yield f"checkpointed, committed and next step are out of order: {marks}"
    if sorted(run.steps) != list(range(run.checkpointed_steps, run.next_step)):
        yield f"stored steps are {sorted(run.steps)} between {marks[0]} and {marks[2]}"
    if run.published.epoch != run.epoch:
        yield f"published {run.published} in epoch {run.epoch}"
    at = [p.committed_steps for p in run.publishes]
    if at != sorted(set(at)) or any(committed > run.committed_steps for committed in at):
        yield f"publishes are remembered at {at} with {run.committed_steps} steps committed"


def _payloads(run: RunState) -> Iterator[str]:
    missing = [group.group_id for group in _kept(run) if group.payload_key not in run.payloads.bodies]
    if missing:
        yield f"payloads of {missing} are gone"


def _kept(run: RunState) -> Iterator[Group]:
    yield from run.queue
    for step in run.steps.values():
        yield from step.groups
