"""Views into the model for the machine: what a run's callers would know, and what makes a history interesting.

The only place where the tests depend on how the model keeps its state.
"""

from buffer_service.domain.gate import too_stale
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.ops.groups import TICKET_MS
from tests.oracle import ReferenceModel
from tests.oracle.engines import FORGOTTEN_MS, TURN_TTL_MS
from tests.oracle.records import Group, Hold, Lease
from tests.oracle.state import RunState
from tests.oracle.steps import Step


class Inside:
    """A window into one run of a model; empty while there is no such run."""

    def __init__(self, model: ReferenceModel, run_id: str) -> None:
        self._model = model
        self._run_id = run_id

    @property
    def _run(self) -> RunState | None:
        return self._model._runs.get(self._run_id)

    def _step(self, step: int) -> Step | None:
        return self._run.steps.get(step) if self._run else None

    # ── workers ──

    def leases(self) -> dict[str, Lease]:
        """Leases by id, with those that are past their expiry and not taken back yet."""
        leased = self._run.leases.tasks.values() if self._run else ()
        return {task.lease_id: task.lease for task in leased if task.lease}

    def stages(self) -> dict[str, tuple[Group, Hold]]:
        """Groups that workers of stages hold, by the lease's id, with those that are past their expiry."""
        held = [group for group in self._run.queue if group.hold] if self._run else []
        return {f"{one.group_id}/{one.stage}:{one.hold.number}": (one, one.hold) for one in held if one.hold}

    def environments(self) -> dict[str, str]:
        """Environments of tasks by id."""
        return {task_id: task.environment for task_id, task in self._run.tasks.items()} if self._run else {}

    def attempts(self) -> list[tuple[str, int, int]]:
        """Task, incarnation and last attempt of every task that waits for a result."""
        tasks = self._run.tasks.values() if self._run else ()
        return [(task.task_id, task.incarnation, task.attempt) for task in tasks if task.is_open]

    def line(self) -> frozenset[str]:
        """Payload keys of those who wait for room."""
        return frozenset(key for key, _ in self._run.line) if self._run else frozenset()

    def workers(self) -> int:
        """Count how many are known."""
        return len(self._run.leases.workers) if self._run else 0

    def is_too_old(self, loaded: WeightVersion) -> bool:
        """Tell whether groups that are started with these weights are too stale for the very next step."""
        run = self._run
        if run is None:
            return False
        head = run.timeline.effective(loaded)
        return too_stale(run.policy, train_version=run.train_version, head_version=head)

    # ── steps ──

    def micro_batches_of(self, step: int) -> int:
        """Closed micro-batches of a step that is stored or open."""
        found = self._step(step)
        return len(found.micro_batches) if found else 0

    def groups_of(self, step: int) -> list[str]:
        """Ids of the groups of a step that is stored or open, and of those that it uses again."""
        found = self._step(step)
        return [group.group_id for group in (*found.groups, *found.reused_again)] if found else []

    def reused_of(self, step: int) -> list[str]:
        """Ids of the groups that a step uses again."""
        found = self._step(step)
        return [group.group_id for group in found.reused_again] if found else []

    def rejected_of(self, step: int) -> list[str]:
        """Ids of the groups that were rejected from it."""
        found = self._step(step)
        return sorted(found.rejected) if found else []

    def lacking(self) -> list[tuple[int, int]]:
        """Complete steps that lack groups, and how many."""
        steps = self._run.steps if self._run else {}
        return [(number, step.missing) for number, step in sorted(steps.items()) if step.missing]

    def queued(self) -> list[str]:
        """Ids of the queued groups."""
        return [group.group_id for group in self._run.queue] if self._run else []

    def world_size_of(self, step: int, number: int) -> int | None:
        """Tell for how many ranks a closed micro-batch is split."""
        found = self._step(step)
        return found.micro_batches[number].world_size if found and number < len(found.micro_batches) else None

    def missing(self, world_size: int) -> int:
        """Count how many more groups the next micro-batch needs, as far as their number decides."""
        if self._run is None:
            return 0
        policy, found = self._run.policy, self._step(self._run.next_step)
        target, micro, present = policy.batch_groups, policy.micro_batch_groups, 0
        if found is not None:
            target, micro, present = found.form.target, found.form.micro_groups, len(found.groups)
        needed = min(world_size * micro, target - present) if micro else target
        return needed - self._run.queue.ready

    # ── time ──

    def due(self) -> list[int]:
        """Times, in ms, on both sides of which rules on leases and back-off differ."""
        run = self._run
        if run is None:
            return []
        expiries = [lease.expiry for lease in self.leases().values()]
        expiries += [hold.expiry for _, hold in self.stages().values()]
        backing_off = [task.not_before for task in run.tasks.values() if task in run.pending]
        return [*expiries, *(expiry + 1 for expiry in expiries), *backing_off, *(due - 1 for due in backing_off)]

    def permits(self) -> list[int]:
        """Last moments of permits of engines that load, and of turns to get one, and those after."""
        if self._run is None:
            return []
        engines = self._run.engines
        turns = [engines.heard_ms[engine_id] + TURN_TTL_MS for engine_id in engines.line]
        return [moment + more for moment in (*engines.permits.values(), *turns) for more in (0, 1)]

    def loading(self) -> list[str]:
        """Engines that have a permit."""
        return sorted(self._run.engines.held(self._run.now)) if self._run else []

    def has_free_permit(self) -> bool:
        """Tell whether fewer engines load than may."""
        run = self._run
        return run is not None and len(run.engines.held(run.now)) < run.policy.max_unavailable_engines

    def silences(self) -> list[int]:
        """Last moments at which engines and workers are still remembered, and those after."""
        if self._run is None:
            return []
        heard = [*self._run.engines.heard_ms.values(), *(w.heard_ms for w in self._run.leases.workers.values())]
        return [moment + FORGOTTEN_MS + more for moment in heard for more in (0, 1)]

    def moments(self) -> list[int]:
        """The same, and where places in the line lapse."""
        run = self._run
        lapses = [waiter.touched + TICKET_MS for _, waiter in run.line] if run else []
        return [*self.due(), *lapses, *(lapse + 1 for lapse in lapses)]
