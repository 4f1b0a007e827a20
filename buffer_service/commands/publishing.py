"""Commands on weights: publish, plan, view; reports of engines."""

from buffer_service.commands.replies import just_revision, pack
from buffer_service.commands.runs import free
from buffer_service.domain import ops
from buffer_service.domain.command import Command, Fields
from buffer_service.rules.totals import ENGINE_SAMPLES
from buffer_wire.revision import NO_REVISION, Revision

UNSET = -1


def publish(run_id: str, publish: ops.Publish, *, seen_revision: Revision = NO_REVISION) -> Command[ops.Published]:
    """Publish and commit in one decision. Raises StaleTerm, VersionConflict, StepAhead."""
    through = UNSET if publish.commit_through is None else publish.commit_through
    clock = publish.clock or ops.TrainerClock(busy_ms=UNSET, wait_ms=UNSET)
    what = (publish.term, publish.version, publish.manifest, through, clock.busy_ms, clock.wait_ms)
    return Command(run_id, "publish", pack(seen_revision, *what), _published, rest=free(run_id))


def plan_collective(
    run_id: str, plan: ops.PlanCollective, *, seen_revision: Revision = NO_REVISION
) -> Command[Revision]:
    """Announce a collective update in place of an earlier one; returns the revision.

    A publish of its version or a newer one ends it, and so does a resume. Raises StaleTerm, VersionConflict,
    RunPaused.
    """
    return Command(run_id, "plan", pack(seen_revision, plan.term, plan.version, plan.plan), just_revision)


def weights(run_id: str) -> Command[ops.WeightsView]:
    """The published weights."""
    return Command(run_id, "weights", pack(), _weights)


def report_engine(
    run_id: str, report: ops.EngineReport, *, seen_revision: Revision = NO_REVISION
) -> Command[ops.EngineReported]:
    """Record an engine's state; give or take back its permit to be out of service for a load."""
    prepared = report.prepared or ops.WeightVersion()
    packed = pack(
        report.engine_id,
        report.worker_id,
        report.state,
        report.loaded.term,
        report.loaded.version,
        report.reloads,
        report.last_reload_ms,
        report.last_error,
        report.errors,
        report.membership,
        prepared.term,
        prepared.version,
        report.weights_url,
    )
    reloads = list(report.reload_counters)
    counters = (report.decoded_tokens, report.decode_busy_ms, report.decode_request_ms)
    request = (seen_revision, report.engine_id, packed, report.state, int(report.wants_load), *counters, reloads)
    return Command(run_id, "report_engine", pack(*request, report.weights_from, _samples(report)), _reported)


def _samples(report: ops.EngineReport) -> bytes:
    """Numbers of the engine's samples, packed; empty when there are none."""
    samples = [getattr(report, name) for name in ENGINE_SAMPLES]
    return pack(*samples) if any(samples) else b""


def _published(_tag: str, fields: Fields) -> ops.Published:
    revision, term, version, committed, _ = fields
    return ops.Published(revision, ops.WeightVersion(term, version), committed)


def _weights(_tag: str, fields: Fields) -> ops.WeightsView:
    revision, term, version, manifest, paused, plan, may_load = fields
    published = ops.WeightVersion(term, version)
    return ops.WeightsView(revision, published, manifest, bool(paused), plan, bool(may_load))


def _reported(_tag: str, fields: Fields) -> ops.EngineReported:
    revision, term, version, may_load = fields
    return ops.EngineReported(revision, ops.WeightVersion(term, version), bool(may_load))
