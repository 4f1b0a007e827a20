"""What /metrics answers: runs and store as one look at the store finds them, and what the processes have written.

Invariant: whatever the store does, the answer comes within LOOK_S and the time it takes to write it, with the metrics
of the processes and `rollout_buffer_store_up`; metrics of runs are those of all runs or of none.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.registry import Collector

from buffer_service.admin.evaluation_metrics import EvaluationCollector
from buffer_service.admin.run_metrics import RunCollector
from buffer_service.admin.staleness_metrics import StalenessCollector
from buffer_service.admin.store_metrics import StoreCollector
from buffer_service.domain.evaluations import EvaluationView
from buffer_service.domain.ops import RunView, StoreFacts
from buffer_service.domain.ports import RunStore
from buffer_service.security.gate import caller
from buffer_wire.errors import StoreFault, UnknownRun

log = structlog.get_logger(__name__)

LOOK_S = 4.0
"""For all that a scrape asks of the store; Prometheus itself gives a scrape 10 s unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found; `facts` is None, and there are no runs, where the store did not answer in time."""

    facts: StoreFacts | None = None
    views: Sequence[RunView] = ()
    evaluations: Sequence[tuple[str, Sequence[EvaluationView]]] = ()

    def collectors(self) -> Sequence[Collector]:
        """Of everything that is asked of the store."""
        return (
            RunCollector(self.views),
            StalenessCollector(self.views),
            EvaluationCollector(dict(self.evaluations)),
            StoreCollector(self.facts),
        )


async def scrape(store: RunStore, metrics_dir: Path, collectors: Iterable[Collector]) -> bytes:
    """The text of a scrape by the present caller, whose runs alone are in it; `collectors`: more of this process."""
    processes, here = CollectorRegistry(), CollectorRegistry()
    multiprocess.MultiProcessCollector(processes, path=str(metrics_dir))  # type: ignore[no-untyped-call]
    for collector in (*(await _look(store)).collectors(), *collectors):
        here.register(collector)
    return await asyncio.to_thread(lambda: generate_latest(processes) + generate_latest(here))


async def _look(store: RunStore) -> Look:
    try:
        async with asyncio.timeout(LOOK_S):
            facts = await store.facts()
            views = await visible_views(store)
            evaluations = []
            for view in views:
                with contextlib.suppress(UnknownRun):  # Deleted since it was listed.
                    _, found = await store.evaluations(view.run_id, acknowledges=False)
                    evaluations.append((view.run_id, found))
    except (StoreFault, TimeoutError) as error:
        log.warning("scrape without the store", why=str(error) or f"no answer within {LOOK_S:g} s")
        return Look()
    return Look(facts, views, evaluations)


async def visible_views(store: RunStore) -> list[RunView]:
    """Of all runs that the present caller may see."""
    views = []
    for run_id in caller().visible(await store.list_runs()):
        with contextlib.suppress(UnknownRun):  # Deleted since it was listed.
            views.append(await store.view(run_id))
    return views
