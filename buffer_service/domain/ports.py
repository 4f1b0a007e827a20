"""What the RPC and admin sides need from a store; `buffer_service.store` implements it.

Every method is one try: none waits for the state to change, and none sleeps. A method that mutates takes
`seen_revision`, the highest revision its caller has seen, and raises StoreRolledBack when the store is behind it.
Errors are those of `buffer_wire.errors`; each method's docstring names its own, and all may raise UnknownRun and
StoreFault.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from buffer_service.domain import ops
from buffer_service.domain.evaluations import EvaluationStore
from buffer_service.domain.inspection import InspectStore
from buffer_service.domain.policy import RunPolicy
from buffer_wire.revision import NO_REVISION, Revision


class Topic(StrEnum):
    """What a waiter waits for. A notification is a hint: check, wait, check again."""

    GROUPS = "groups"
    """Groups were queued (pulls wait for it)."""
    TASKS = "tasks"
    """Tasks became pending or capacity was freed (leases wait for it)."""
    SPACE = "space"
    """Groups left the queue (blocked pushes wait for it)."""
    WEIGHTS = "weights"
    """Weights were published or planned, the run was paused or resumed, or an engine may load."""
    EVALUATIONS = "evaluations"
    """Tasks of evaluations became pending (leases of them wait for it)."""
    RESULTS = "results"
    """Tasks of evaluations ended (readers wait for it)."""


class Notifications(Protocol):
    """Hints that the state of a run changed."""

    async def wait(self, run_id: str, topic: Topic, seen: int, timeout_s: float) -> int:
        """Wait until the ticket of (run, topic) exceeds `seen`, or the timeout passes; returns the present ticket.

        Take a ticket with `ticket` BEFORE checking the state, check, and then wait with it: no change is missed.
        """
        ...

    def ticket(self, run_id: str, topic: Topic) -> int:
        """The present ticket of (run, topic)."""
        ...


class RunStore(EvaluationStore, InspectStore, Protocol):
    """Runs, tasks, groups, batches and weights, kept by the rules."""

    @property
    def notifications(self) -> Notifications:
        """Hints of changes on this store."""
        ...

    async def create_run(
        self, run_id: str, policy: RunPolicy, *, revision: int = 1, secret: str = ""
    ) -> tuple[ops.RunView, bool]:
        """Create a run, or return the existing one when its policy is the same. Raises RunExists, NotReady (it is being
        deleted).

        A new run's revision begins at `revision`. It must be beyond that of any earlier run of the same name, which its
        callers may remember as seen. `secret` is that of the proofs of its revisions; empty: one is drawn.
        """
        ...

    async def list_runs(self) -> Sequence[str]:
        """Ids of all runs, sorted."""
        ...

    async def view(self, run_id: str) -> ops.RunView:
        """The whole state of a run, taken at one moment."""
        ...

    async def update_policy(
        self,
        run_id: str,
        policy: RunPolicy,
        expected: RunPolicy | None = None,
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> Revision:
        """Replace the policy; returns the revision. Raises PolicyChanged when it is another than `expected`, which None
        does not ask; InvalidPolicy for a measure that cannot change now.
        """
        ...

    async def pause_run(self, run_id: str) -> Revision:
        """Hold the run: no leases, no submits, no new batches; returns the revision."""
        ...

    async def drain_run(self, run_id: str) -> Revision:
        """Let the run end: no leases, no submits; what is queued and leased is still trained. Returns the revision."""
        ...

    async def continue_run(self, run_id: str) -> Revision:
        """Undo pause_run and drain_run; returns the revision."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Delete the run with all its keys. From the first moment on nobody finds it any more; after a crash any
        replica's sweep goes on.
        """
        ...

    async def records(self, run_id: str, after: str, limit: int) -> Sequence[ops.Record]:
        """Events of the run's recording after an event id ("" for the first that is kept), at most `limit`."""
        ...

    async def submit(self, run_id: str, submit: ops.Submit, *, seen_revision: Revision = NO_REVISION) -> ops.Submitted:
        """Add tasks and move the cursor.

        Raises StaleEpoch, CursorConflict, PendingFull, RunPaused, InvalidField (a task id that exists).
        """
        ...

    async def lease(self, run_id: str, ask: ops.LeaseAsk, *, seen_revision: Revision = NO_REVISION) -> ops.Leased:
        """Lease tasks; an empty grant list comes with the reason."""
        ...

    async def extend(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        lease_ids: Sequence[str],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Extended:
        """Prolong leases that are live."""
        ...

    async def give_back(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        returns: Sequence[ops.LeaseReturn],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Returned:
        """Return leases with their continuations."""
        ...

    async def push(
        self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        """Store payloads and index them. A BLOCKED group stands in the run's line, and so does every later one of the
        call that would need room. Raises RunPaused, StoreOutOfMemory.
        """
        ...

    async def retry_push(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """Try blocked groups again by their payload keys; extends their leases while they stay blocked."""
        ...

    async def abandon_push(self, run_id: str, payload_keys: Sequence[str]) -> None:
        """Give up blocked groups: their payloads are deleted. Of a run that is gone there are none left."""
        ...

    async def pull(
        self, run_id: str, pull: ops.Pull, *, seen_revision: Revision = NO_REVISION
    ) -> ops.Batch | ops.Short:
        """Close a round of a step if it is its turn and enough is queued, or return the stored one. Evicts what is too
        stale first. Raises StaleEpoch, StepAhead, WorldSizeMismatch, ReplayGap, RunPaused, FailureBudgetExceeded,
        InvalidField (train_version, rank, round, batch_groups, world_size).
        """
        ...

    async def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[ops.Buffer | None]:
        """Stored bodies, None where one is gone."""
        ...

    async def report_lost(self, run_id: str, epoch: int, step: int, payload_keys: Sequence[str]) -> None:
        """A pull of that epoch found payloads gone: settle the groups of the step that have these as lost, reopen their
        tasks. Raises StaleEpoch.
        """
        ...

    async def commit(
        self, run_id: str, epoch: int, through_step: int, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, int]:
        """Settle delivered groups as trained; returns (revision, committed_steps). Raises StaleEpoch, StepAhead."""
        ...

    async def publish(
        self, run_id: str, publish: ops.Publish, *, seen_revision: Revision = NO_REVISION
    ) -> ops.Published:
        """Publish and commit in one decision. Raises StaleEpoch, VersionConflict, StepAhead."""
        ...

    async def checkpoint(
        self, run_id: str, epoch: int, through_step: int, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, int]:
        """Free replay data and tombstones; returns (revision, checkpointed_steps). Raises StaleEpoch, NotCommitted."""
        ...

    async def resume(self, run_id: str, resume: ops.Resume) -> ops.Resumed:
        """Take the run over; clears a pause. Raises ReplayGap, StepAhead."""
        ...

    async def plan_collective(
        self, run_id: str, plan: ops.PlanCollective, *, seen_revision: Revision = NO_REVISION
    ) -> Revision:
        """Announce a collective update in place of an earlier one; a publish of its version or a newer one ends it, and
        so does a resume. Returns the revision. Raises StaleEpoch, VersionConflict, RunPaused.
        """
        ...

    async def weights(self, run_id: str) -> ops.WeightsView:
        """The published weights."""
        ...

    async def report_engine(
        self, run_id: str, report: ops.EngineReport, *, seen_revision: Revision = NO_REVISION
    ) -> ops.EngineReported:
        """Record an engine's state; give or take back its place among those that are out of service for a load."""
        ...

    async def facts(self) -> ops.StoreFacts:
        """What the store's server says of itself."""
        ...

    async def sweep(self) -> int:
        """Expire leases, delete trash and stale staging of every run, forget engines and idle workers that were not
        heard of for an hour; returns how many things were done.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
