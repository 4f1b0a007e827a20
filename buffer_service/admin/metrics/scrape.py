"""Answer of /metrics: runs and store from one look at the store, and the metrics that the processes have written.

Invariant: whatever the store does, the answer comes within READ_S and the time it takes to write it. It always has the
metrics of the processes and `rollout_buffer_store_up`; runs that it lacks are counted by `rollout_buffer_runs_unread`.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from buffer_service.admin.metrics.control import ControlCollector
from buffer_service.admin.metrics.evaluations import EvaluationCollector
from buffer_service.admin.metrics.runs import RunCollector
from buffer_service.admin.metrics.staleness import StalenessCollector
from buffer_service.admin.metrics.store import StoreCollector
from buffer_service.admin.reading import READ_S, RunReader, read_run
from buffer_service.domain.evaluations import EvaluationView
from buffer_service.domain.ops import RunView, StoreFacts
from buffer_service.domain.ports import RunStore
from buffer_service.observability.shared_values import SharedMetrics
from buffer_wire.errors import StoreFault

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Snapshot of the store; `facts` is None, and there are no runs, where the store did not answer in time."""

    facts: StoreFacts | None = None
    runs: Sequence[tuple[RunView, Sequence[EvaluationView]]] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    """Runs that were not read, and why, as in reading.Runs."""

    def collectors(self) -> Sequence[Collector]:
        """Collectors over everything that was read from the store."""
        views = [view for view, _ in self.runs]
        return (
            RunCollector(views),
            StalenessCollector(views),
            ControlCollector(views),
            EvaluationCollector({view.run_id: evaluations for view, evaluations in self.runs}),
            StoreCollector(self.facts, self.unread),
        )


class ProcessCollector(Collector):
    """Metrics that the rpc processes have written; of runs, only those of `run_ids`: others are gone or not visible."""

    def __init__(self, written: SharedMetrics, run_ids: Collection[str]) -> None:
        self._written = written
        self._run_ids = {None, *run_ids}

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families, without the samples of other runs."""
        for family in self._written.collect():
            family.samples = [one for one in family.samples if one.labels.get("run") in self._run_ids]
            yield family


async def scrape(store: RunStore, reader: RunReader, written: SharedMetrics, collectors: Iterable[Collector]) -> bytes:
    """The text of a scrape by the present caller, whose runs alone are in it; `collectors`: more of this process."""
    processes, here = CollectorRegistry(), CollectorRegistry()
    snapshot = await _snapshot(store, reader)
    processes.register(ProcessCollector(written, {view.run_id for view, _ in snapshot.runs}))
    for collector in (*snapshot.collectors(), *collectors):
        here.register(collector)
    return await asyncio.to_thread(lambda: generate_latest(processes) + generate_latest(here))


async def _snapshot(store: RunStore, reader: RunReader) -> StoreSnapshot:
    deadline = asyncio.get_running_loop().time() + READ_S
    try:
        async with asyncio.timeout_at(deadline):
            facts = await store.facts()
        runs = await reader.read(partial(read_run, store), deadline)
    except (StoreFault, TimeoutError) as error:
        log.warning("scrape without the store", why=str(error) or f"no answer within {READ_S:g} s")
        return StoreSnapshot()
    return StoreSnapshot(facts, runs.found, runs.unread)
