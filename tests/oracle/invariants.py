"""The invariants that can be seen in one state of a run.

Both ledgers balance and agree with what exists, and those of the environments add up to the run's; a task has at most
one live lease, and one exactly while it is leased; no group is in two places; no micro-batch was closed with a group
staler than max_staleness by the measure; progress marks are in order and every step between the freed and the next one
is stored; what is kept has its payload; whoever waits in line stands in order of tickets; nobody's turn is further
ahead than one stride; the last accepted group was within caps and quotas; what is planned is newer than what is
published; an engine that loads waits for nothing. (Caps and quotas are not looked at now: a policy that lowers one
takes effect with the next push.)
"""

from collections import Counter
from collections.abc import Iterator

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import MAX_ENVIRONMENTS, UNSET
from buffer_service.domain.quota import within_caps
from buffer_service.rules.transitions import GroupState, TaskState
from tests.oracle.records import Group
from tests.oracle.rules.ledger import GroupLedger, add
from tests.oracle.rules.quota import within_quotas
from tests.oracle.rules.stride import STRIDE
from tests.oracle.state import RunState
from tests.oracle.steps import Step
from tests.oracle.view import existing_groups


class BrokenInvariant(RuntimeError):
    """The state contradicts a rule: a defect of the rules."""


def check(run: RunState) -> None:
    """Raise BrokenInvariant with every contradiction that is found."""
    rules = (
        _ledgers,
        _environments,
        _queue,
        _turns,
        _accepted,
        _line,
        _tasks,
        _places,
        _steps,
        _progress,
        _payloads,
        _reuse,
        _weights,
        _engines,
    )
    found = [contradiction for rule in rules for contradiction in rule(run)]
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


def _environments(run: RunState) -> Iterator[str]:
    for name, total in run.group_ledger.entries().items():
        parts = Amount()
        for ledger in run.environment_ledgers.values():
            parts = add(parts, ledger.entries()[name])
        if parts != total:
            yield f"{name} groups of the environments add up to {parts}, the ledger has {total}"
    unbalanced = [name for name, ledger in run.environment_ledgers.items() if not ledger.balanced()]
    if unbalanced:
        yield f"ledgers of environments {unbalanced} do not balance"
    existing: dict[str, GroupLedger] = {}
    for group in _kept(run):
        ledger = existing.setdefault(group.environment, GroupLedger())
        ledger.states[group.state] = add(ledger.states[group.state], group.amount)
    for name, ledger in run.environment_ledgers.items():
        there = existing.get(name, GroupLedger())
        for state in (GroupState.QUEUED, GroupState.FORMING, GroupState.DELIVERED):
            if there.states[state] != ledger.states[state]:
                yield f"{there.states[state]} {state} groups of {name} exist, its ledger has {ledger.states[state]}"
    if not run.environment_ledgers.keys() <= run.environments:
        yield f"groups of other environments than {sorted(run.environments)} were accepted"
    if len(run.environments) > MAX_ENVIRONMENTS:
        yield f"there are {len(run.environments)} environments"


def _queue(run: RunState) -> Iterator[str]:
    sums = sum(g.facts.tokens for g in run.queue), sum(g.facts.size_bytes for g in run.queue)
    if sums != (run.queue.tokens, run.queue.bytes):
        yield f"queue sums are {(run.queue.tokens, run.queue.bytes)}, its groups have {sums}"
    classed = 0
    for environment, priority, groups in run.queue.classes:
        classed += len(groups)
        strangers = [
            g for g in groups if g not in run.queue or (g.environment, g.task.priority) != (environment, priority)
        ]
        if strangers or not groups:
            yield f"class {environment}, {priority} is empty or holds strangers {[g.group_id for g in strangers]}"
    staged = [group for group in run.queue if group.stage]
    if classed != run.queue.ready or classed + len(staged) != len(run.queue):
        yield f"{classed} groups are in classes, {len(staged)} in stages, {len(run.queue)} in the queue"
    if any(group.hold is not None and not group.stage for group in run.queue):
        yield "groups are held that are in no stage"
    numbers = [group.hold.number for group in staged if group.hold]
    if len(set(numbers)) < len(numbers):
        yield f"leases of stages have one number: {sorted(numbers)}"


def _turns(run: RunState) -> Iterator[str]:
    for turns in (run.lease_turns, run.queue_turns):
        if turns.passes and not run.mixture.has_shares:
            yield f"environments have passes {turns.passes} without shares"
        if any(not 0 <= one <= turns.virtual + STRIDE for one in turns.passes.values()):
            yield f"passes {turns.passes} are more than a stride from the virtual time {turns.virtual}"


def _accepted(run: RunState) -> Iterator[str]:
    if run.after_accept is not None:
        policy, queued, live = run.after_accept
        if not within_caps(policy, queued):
            yield f"a push was accepted above a cap: {queued} queued"
        if not within_quotas(policy, live):
            yield f"a push was accepted above a quota: {live} live"


def _line(run: RunState) -> Iterator[str]:
    tickets = [waiter.ticket for _, waiter in run.line]
    if tickets != sorted(set(tickets)) or any(not 0 < ticket <= run.line.tickets for ticket in tickets):
        yield f"tickets along the line are {tickets}, {run.line.tickets} were given"
    indexed = {group.payload_key for group in _kept(run)}
    for payload_key, _ in run.line:
        if payload_key not in run.payloads.bodies or payload_key in indexed:
            yield f"{payload_key} waits in line and is gone, or was accepted"


def _tasks(run: RunState) -> Iterator[str]:
    for task in run.tasks.values():
        leased, pending = task.state == TaskState.LEASED, task.state == TaskState.PENDING
        if leased != (task.lease is not None) or leased != (run.leases.tasks.get(task.task_id) is task):
            yield f"task {task.task_id} is {task.state} with lease {task.lease}"
        if pending != (task in run.pending):
            yield f"task {task.task_id} is {task.state}, yet in or out of the pending ones"
        if (task.state == TaskState.COMPLETED) != (task.accepted_attempt is not None):
            yield f"task {task.task_id} is {task.state} with accepted attempt {task.accepted_attempt}"
        if task.partial_rollout is not None and not task.is_open:
            yield f"task {task.task_id} is {task.state} and keeps a partial rollout"
        if task.lease is not None and task.task_id not in run.leases.workers[task.lease.worker_id].leased:
            yield f"task {task.task_id} is leased to {task.lease.worker_id}, who does not hold it"
    held = Counter(task_id for worker in run.leases.workers.values() for task_id in worker.leased)
    if held != Counter(run.leases.tasks.keys()):
        yield f"workers hold {dict(held)}, leased are {sorted(run.leases.tasks)}"


def _places(run: RunState) -> Iterator[str]:
    places = Counter(group.group_id for group in _kept(run))
    if any(number > 1 for number in places.values()):
        yield f"groups are in two places: {[name for name, number in places.items() if number > 1]}"
    if any(group.state != GroupState.QUEUED for group in run.queue):
        yield "groups are in the queue that are not queued"


def _steps(run: RunState) -> Iterator[str]:
    for number, step in run.steps.items():
        yield from _micro_batches(step)
        expected = GroupState.TRAINED if number < run.committed_steps else GroupState.DELIVERED
        if number == run.next_step:
            expected = GroupState.FORMING
            if not step.form.streamed or len(step.groups) >= step.form.target:
                yield f"step {number} is still open with {len(step.groups)} of {step.form.target} groups"
        if any(group.state != expected for group in step.groups):
            yield f"step {number} holds groups that are not {expected}"


def _micro_batches(step: Step) -> Iterator[str]:
    more = len(step.micro_batches) > 1 and not step.form.streamed and not step.rejected
    if not step.micro_batches or more:
        yield f"step {step.step} has {len(step.micro_batches)} micro-batches"
    if len(step.groups) > step.form.target:
        yield f"step {step.step} has {len(step.groups)} groups of {step.form.target}"
    for index, one in enumerate(step.micro_batches):
        if one.max_staleness != UNSET and one.stalest_milli > one.max_staleness * MILLI:
            behind = one.stalest_milli
            yield f"micro-batch {index} of step {step.step} closed with a group {behind} milli-versions behind"
        if one.staleness.keys() != {group.group_id for group in one.groups}:
            yield f"micro-batch {index} of step {step.step} holds other groups than those it closed with"


def _progress(run: RunState) -> Iterator[str]:
    marks = (run.checkpointed_steps, run.committed_steps, run.next_step)
    if not (0 <= marks[0] <= marks[1] <= marks[2]):
        yield f"checkpointed, committed and next step are out of order: {marks}"
    steps = sorted(run.steps)
    if steps[-1:] == [run.next_step]:
        steps.pop()
    if steps != list(range(run.checkpointed_steps, run.next_step)):
        yield f"stored steps are {sorted(run.steps)} between {marks[0]} and {marks[2]}"
    trained = sum(step.bytes for number, step in run.steps.items() if number < run.committed_steps)
    if trained != run.retained_bytes:
        yield f"{run.retained_bytes} bytes are counted as retained, trained steps have {trained}"
    if run.published.term != run.term:
        yield f"published {run.published} in term {run.term}"
    at = [p.committed_steps for p in run.publishes]
    if at != sorted(set(at)) or any(committed > run.committed_steps for committed in at):
        yield f"publishes are remembered at {at} with {run.committed_steps} steps committed"


def _payloads(run: RunState) -> Iterator[str]:
    bodies = run.payloads.bodies
    missing = [group.group_id for group in _kept(run) if any(key not in bodies for key in group.payload_keys)]
    if missing:
        yield f"payloads of {missing} are gone"


def _reuse(run: RunState) -> Iterator[str]:
    """Uses balance; what is used again is there, as often as it may be, and fresh enough for who drew it."""
    uses = run.uses
    if uses["drawn"] != uses["delivered"] + uses["trained"] + uses["given_back"] + uses["lost"]:
        yield f"uses do not balance: {uses}"
    held = Counter((group.sequence, number) for number, step in run.steps.items() for group in step.reused_again)
    for sequence, number in held:
        kept = run.kept.get(sequence)
        if kept is None or number not in kept.holders or kept.origin >= number:
            yield f"step {number} uses a group again that nothing keeps, or of a later step"
    for number, step in run.steps.items():
        stale = (
            [one for one in step.reused.staleness.values() if one > step.reused.max_staleness] if step.reused else []
        )
        if stale:
            yield f"step {number} uses groups again that are {stale} versions old"
        if any(count > 1 for count in Counter(group.sequence for group in step.reused_again).values()):
            yield f"step {number} uses a group twice"
    for kept in run.kept.values():
        name = kept.group.group_id
        if any(key not in run.payloads.bodies for key in kept.group.payload_keys):
            yield f"{name} is kept without its payload"
        if not kept.orphan and run.tasks.get(kept.group.task.task_id) is not kept.group.task:
            yield f"{name} is kept without its task"
        if kept.pooled and kept.origin >= run.committed_steps:
            yield f"{name} may be used again before it was trained on"
        if len(kept.holders - {kept.origin}) > kept.uses:
            yield f"{name} has {kept.uses} uses in the steps {kept.holders}"


def _weights(run: RunState) -> Iterator[str]:
    if run.plan is not None and (run.plan.term != run.term or run.plan.version <= run.published.version):
        yield f"version {run.plan.version} of term {run.plan.term} is planned, {run.published} is published"


def _engines(run: RunState) -> Iterator[str]:
    engines = run.engines
    if engines.reports.keys() != engines.heard_ms.keys():
        yield f"engines {sorted(engines.reports)} are known, {sorted(engines.heard_ms)} were heard of"
    if not (engines.permits.keys() | engines.line.keys()) <= engines.reports.keys():
        yield f"engines that are not known load or wait for it: {engines.permits}, {engines.line}"
    if engines.held(run.now) & engines.line.keys():
        yield f"engines wait for the place that they have: {engines.permits}, {engines.line}"


def _kept(run: RunState) -> Iterator[Group]:
    yield from run.queue
    for step in run.steps.values():
        yield from step.groups
