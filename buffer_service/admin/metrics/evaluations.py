"""Evaluations of the runs as Prometheus metrics, read from the store once per scrape; no label names an evaluation."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from buffer_service.domain.evaluations import EvaluationView

_STATES = ("pending", "leased", "finished", "failed")


class EvaluationCollector(Collector):
    """Metrics of views that were read before, by run: collecting does no I/O."""

    def __init__(self, views: Mapping[str, Sequence[EvaluationView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric families of evaluations."""
        kept = GaugeMetricFamily("rollout_buffer_evaluations", "Evaluations that are kept.", labels=["run"])
        stored = GaugeMetricFamily(
            "rollout_buffer_evaluation_stored_bytes", "Tasks and results of evaluations that are kept.", labels=["run"]
        )
        tasks = GaugeMetricFamily(
            "rollout_buffer_evaluation_tasks",
            "Tasks of the evaluations that are kept, by state.",
            labels=["run", "state"],
        )
        for run_id, views in self._views.items():
            kept.add_metric([run_id], len(views))
            stored.add_metric([run_id], sum(view.stored_bytes for view in views))
            for state in _STATES:
                tasks.add_metric([run_id, state], sum(getattr(view, state) for view in views))
        yield from (kept, stored, tasks)
