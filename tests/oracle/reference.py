"""ReferenceModel: the runs, the clock, and the checks that come before every operation."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.decisions import Decision
from buffer_wire.errors import (
    InvalidPolicy,
    PolicyChanged,
    RunExists,
    RunPaused,
    StoreRolledBack,
    UnknownRun,
    UnprovenRevision,
)
from buffer_wire.revision import NO_REVISION, Revision
from tests.oracle import (
    batches,
    evaluation_leases,
    fresh_start,
    invariants,
    leasing,
    progress,
    pushing,
    resuming,
    stages,
    submitting,
    view,
)
from tests.oracle.evaluation_operations import EvaluationOperations
from tests.oracle.records import Payloads
from tests.oracle.rules.proofs import prove
from tests.oracle.state import RunState


class ReferenceModel(EvaluationOperations):
    """All runs, in memory. Methods mirror RunStore; see there for what each raises."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._runs: dict[str, RunState] = {}
        self._payloads: defaultdict[str, Payloads] = defaultdict(Payloads)

    # ── runs ──

    def create_run(
        self, run_id: str, policy: RunPolicy, *, revision: int = 1, secret: str = ""
    ) -> tuple[ops.RunView, bool]:
        """Create a run, or return the existing one when its policy is the same."""
        run = self._runs.get(run_id)
        if run is None:
            now = self._now_ms()
            run = self._runs[run_id] = RunState(
                run_id,
                policy,
                created_ms=now,
                now=now,
                revision=revision,
                secret=secret,
                payloads=self._payloads[run_id],
            )
            return view.view(run, now), True
        if run.stated != policy:
            theirs, ours = policy.to_store(), run.stated.to_store()
            raise RunExists(run_id, ",".join(sorted(name for name in ours if ours[name] != theirs[name])))
        return self.view(run_id), False

    def list_runs(self) -> Sequence[str]:
        """Ids of all runs, sorted."""
        return sorted(self._runs)

    def view(self, run_id: str) -> ops.RunView:
        """The whole state of a run."""
        run = self._known(run_id)
        return view.view(run, max(run.now, self._now_ms()))

    def update_policy(
        self,
        run_id: str,
        policy: RunPolicy,
        expected: RunPolicy | None = None,
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> Revision:
        """Replace the policy, if it is `expected` where that is given; returns the revision."""
        run = self._begin(run_id, seen_revision)
        if expected not in (None, run.stated):
            raise PolicyChanged(run_id)
        if run.stated != policy:
            queued = len(run.queue)
            if queued and policy.staleness_measure is not run.stated.staleness_measure:
                raise InvalidPolicy("staleness_measure", f"cannot change while {queued} groups are queued")
            run.replace_policy(policy)
            stages.leave_unnamed(run)
        return run.settle()

    def pause_run(self, run_id: str) -> Revision:
        """Hold the run; returns the revision."""
        return self._control(run_id, held=True)

    def drain_run(self, run_id: str) -> Revision:
        """Let the run end; returns the revision."""
        return self._control(run_id, draining=True)

    def continue_run(self, run_id: str) -> Revision:
        """Undo pause_run and drain_run; returns the revision."""
        return self._control(run_id, held=False, draining=False)

    def delete_run(self, run_id: str) -> None:
        """Forget the run."""
        self._known(run_id)
        del self._runs[run_id]
        self._payloads[run_id].keep_expiring()

    def records(self, run_id: str, after: str, limit: int) -> Sequence[ops.Record]:
        """Nothing: the model records nothing."""
        self._known(run_id)
        return ()

    # ── tasks ──

    def submit(self, run_id: str, submit: ops.Submit, *, seen_revision: Revision = NO_REVISION) -> ops.Submitted:
        """Add tasks and move the cursor."""
        return submitting.submit(self._begin(run_id, seen_revision), submit)

    def lease(self, run_id: str, ask: ops.LeaseAsk, *, seen_revision: Revision = NO_REVISION) -> ops.Leased:
        """Lease tasks."""
        return leasing.lease(self._begin(run_id, seen_revision), ask)

    def lease_groups(self, run_id: str, ask: ops.StageAsk, *, seen_revision: Revision = NO_REVISION) -> ops.StageLeased:
        """Lease groups that wait in a stage."""
        return stages.lease(self._begin(run_id, seen_revision), ask)

    def extend(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        lease_ids: Sequence[str],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Extended:
        """Prolong leases that are live."""
        return leasing.extend(self._begin(run_id, seen_revision), worker_id, instance_id, lease_ids)

    def give_back(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        returns: Sequence[ops.LeaseReturn],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Returned:
        """Return leases with their partial rollouts."""
        return leasing.give_back(self._begin(run_id, seen_revision), worker_id, instance_id, returns)

    def expire(self, run_id: str) -> int:
        """Expire the leases that are due; forget engines and idle workers that are silent, give up blocked pushes that
        nobody tries. Returns how many leases.
        """
        run = self._begin(run_id)
        expired = leasing.expire(run) + evaluation_leases.expire(run)
        stages.expire(run, len(run.queue))
        for engine_id in run.engines.forget_silent(run.now):
            run.totals.forget_engine(engine_id)
            run.changed = True
        run.leases.forget_silent(run.now)
        run.settle()
        pushing.give_up(run)
        return expired

    # ── groups ──

    def write(self, run_id: str, written: ops.NewGroup) -> None:
        """Write a group's body as its pusher does."""
        self._payloads[run_id].write(pushing.written_key(written), written.body)

    def expire_written(self, run_id: str) -> None:
        """Have all expire that was written and has no group."""
        self._payloads[run_id].expire()

    def push(
        self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        """Store payloads and index them."""
        run = self._begin(run_id, seen_revision)
        run.require_store()
        keys = [pushing.written_key(group) if group.facts.stored else run.payloads.put(group.body) for group in groups]
        return pushing.push(run, [(group.facts, key) for group, key in zip(groups, keys, strict=True)])

    def retry_push(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """Try blocked groups again by their payload keys; a refusal ends their push, so the payloads go."""
        try:
            return pushing.push(self._begin(run_id), groups, retry=True)
        except RunPaused:
            self.abandon_push(run_id, [payload_key for _, payload_key in groups])
            raise

    def abandon_push(self, run_id: str, payload_keys: Sequence[str]) -> None:
        """Give up blocked groups; of a run that is gone there are none left."""
        run = self._runs.get(run_id)
        if run is None:
            return
        for key in payload_keys:
            if key in run.staged:
                pushing.abandon(run, key)

    # ── batches ──

    def pull(self, run_id: str, pull: ops.Pull, *, seen_revision: Revision = NO_REVISION) -> ops.Batch | ops.Short:
        """Close a micro-batch of a step, or return the stored one."""
        batches.check_rank(pull)
        return batches.pull(self._begin(run_id, seen_revision), pull)

    def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[ops.Buffer | None]:
        """Stored bodies, None where one is gone."""
        bodies = self._known(run_id).payloads.bodies
        return [bodies.get(key) for key in payload_keys]

    def reject(self, run_id: str, reject: ops.Reject, *, seen_revision: Revision = NO_REVISION) -> ops.Rejected:
        """Give groups of a step back."""
        return batches.reject(self._begin(run_id, seen_revision), reject)

    def report_lost(self, run_id: str, term: int, step: int, payload_keys: Sequence[str]) -> None:
        """Settle groups of a step as lost and reopen their tasks."""
        batches.report_lost(self._begin(run_id), term, step, frozenset(payload_keys))

    # ── progress ──

    def commit(
        self, run_id: str, term: int, through_step: int, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, int]:
        """Settle delivered groups as trained; returns (revision, committed_steps)."""
        return progress.commit(self._begin(run_id, seen_revision), term, through_step)

    def publish(self, run_id: str, publish: ops.Publish, *, seen_revision: Revision = NO_REVISION) -> ops.Published:
        """Publish and commit in one decision."""
        return progress.publish(self._begin(run_id, seen_revision), publish)

    def decide(self, run_id: str, decision: Decision) -> bool:
        """Keep a controller's decision: the first one for the publish."""
        return progress.decide(self._begin(run_id), decision)

    def plan_collective(
        self, run_id: str, plan: ops.PlanCollective, *, seen_revision: Revision = NO_REVISION
    ) -> Revision:
        """Announce a collective update in place of an earlier one."""
        return progress.plan_collective(self._begin(run_id, seen_revision), plan)

    def checkpoint(
        self, run_id: str, term: int, through_step: int, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, int]:
        """Free replay data and tombstones; returns (revision, checkpointed_steps)."""
        return progress.checkpoint(self._begin(run_id, seen_revision), term, through_step)

    def resume(self, run_id: str, resume: ops.Resume) -> ops.Resumed:
        """Take the run over; clears a pause."""
        return resuming.resume(self._begin(run_id), resume)

    # ── weights and engines ──

    def weights(self, run_id: str) -> ops.WeightsView:
        """The published weights."""
        run = self._known(run_id)
        limit = run.policy.max_unavailable_engines
        return ops.WeightsView(
            run.signed_revision,
            run.published,
            run.manifest,
            paused=bool(run.paused),
            plan=run.plan.plan if run.plan else b"",
            may_load=not limit or len(run.engines.held(max(run.now, self._now_ms()))) < limit,
        )

    def report_engine(
        self, run_id: str, report: ops.EngineReport, *, seen_revision: Revision = NO_REVISION
    ) -> ops.EngineReported:
        """Record an engine's state; give or take back its permit to be out of service for a load."""
        run = self._begin(run_id, seen_revision)
        run.totals.engine(report)
        fresh_start.learn(run, report)
        if run.engines.report(report, run.now):
            run.changed = True
        may_load = run.engines.ask(report, run.policy.max_unavailable_engines, run.now)
        return ops.EngineReported(run.settle(), run.published, may_load)

    # ── oracle ──

    def check_invariants(self, run_id: str) -> None:
        """Raise BrokenInvariant when the state contradicts a rule."""
        invariants.check(self._known(run_id))

    def stored_bodies(self, run_id: str) -> int:
        """Count how many payloads and partial rollouts something refers to."""
        run = self._known(run_id)
        return len(run.payloads.bodies) + sum(task.partial_rollout is not None for task in run.tasks.values())

    def _control(self, run_id: str, *, held: bool | None = None, draining: bool | None = None) -> Revision:
        """An operator's word; None leaves a switch as it is."""
        run = self._begin(run_id)
        before = run.held, run.draining
        run.held = run.held if held is None else held
        run.draining = run.draining if draining is None else draining
        run.changed = before != (run.held, run.draining)
        return run.settle()

    def _known(self, run_id: str) -> RunState:
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRun(run_id)
        return run

    def _begin(self, run_id: str, seen_revision: Revision = NO_REVISION) -> RunState:
        """The run, at the time of this operation; a caller who has provably seen more than there is pauses it."""
        run = self._known(run_id)
        run.now = max(run.now, self._now_ms())
        run.claim = seen_revision
        if seen_revision > run.revision:
            if seen_revision.proof != prove(run.secret, seen_revision).proof:
                raise UnprovenRevision(run_id, seen_revision, run.revision)
            run.rolled_back = True
            run.seen_revision = max(run.seen_revision, seen_revision)
            raise StoreRolledBack(run_id, seen_revision, run.revision)
        return run
