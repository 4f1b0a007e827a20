"""Fresh starts: an engine that is about to load the published weights gets no new task until it has them.

Invariants: it waits at most twice as long as its last load took from the publish on, and never longer than the policy
says. It does not wait where the load took more than an eighth of the time between the last two publishes.
"""

from buffer_service.domain.ops import EngineReport, LeaseAsk
from tests.oracle.state import RunState

SHARE = 8
PATIENCE = 2
MOST_MS = 600_000
GROWTH_MS = 10


def learn(run: RunState, report: EngineReport) -> None:
    """Learn how long a load took; to be called before the report is recorded."""
    said, snapshots = run.engines.reports.get(report.engine_id), _publishes(run)
    if said is None or not snapshots:
        return
    before, now = run.timeline.effective(said.loaded), run.timeline.effective(report.loaded)
    lag = run.now - snapshots[-1]
    if before < run.published.version == now and lag <= MOST_MS:
        last = run.engines.load_lags.get(report.engine_id, MOST_MS)
        run.engines.load_lags[report.engine_id] = min(lag, 2 * last + GROWTH_MS)


def is_due(run: RunState, ask: LeaseAsk) -> bool:
    """Tell whether the asking engine should load first."""
    lag, limit, publishes = run.engines.load_lags.get(ask.engine_id), run.policy.fresh_start_ms, _publishes(run)
    if lag is None or not limit or len(publishes) < 2 or run.timeline.effective(ask.loaded) >= run.published.version:
        return False
    before, published = publishes
    return lag <= limit and lag * SHARE <= published - before and run.now - published <= min(limit, lag * PATIENCE)


def _publishes(run: RunState) -> list[int]:
    """Return the times of the last two publishes; none where they are not known, or something was published since."""
    last = list(run.totals.snapshots)[-2:]
    return [one.time_ms for one in last] if last and last[-1].version == run.published.version else []
