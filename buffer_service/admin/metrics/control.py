"""Controllers of staleness as Prometheus metrics, of the runs that have a target; labels: run, and small fixed sets."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import RunView
from buffer_service.domain.steering.decisions import NO_DECISION, Outcome
from buffer_service.observability.control import knobs


class ControlCollector(Collector):
    """Metrics of views that were read before: collecting does no I/O."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self._views = [view for view in views if view.policy.target_staleness_milli]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metric families of controllers."""
        target = GaugeMetricFamily(
            "rollout_buffer_staleness_target_versions",
            "Mean staleness that a controller holds. By measure: head, token.",
            labels=["run", "measure"],
        )
        outcomes = GaugeMetricFamily(
            "rollout_buffer_control_outcome",
            "1 for the outcome of the controller's last decision: moved, settling, holding, open, out_of_reach.",
            labels=["run", "outcome"],
        )
        moves = CounterMetricFamily(
            "rollout_buffer_control_moves", "Values that the controller has moved.", labels=["run"]
        )
        in_effect = GaugeMetricFamily(
            "rollout_buffer_control_in_effect",
            "Value in effect of a field that the controller may lower; absent: no bound.",
            labels=["run", "field"],
        )
        for view in self._views:
            policy, decided = view.policy, view.decision
            target.add_metric([view.run_id, policy.target_measure], policy.target_staleness_milli / MILLI)
            if decided == NO_DECISION:
                continue
            moves.add_metric([view.run_id], decided.moves)
            for outcome in Outcome:
                outcomes.add_metric([view.run_id, outcome], decided.outcome is outcome)
            for name, (_, value) in knobs(view).items():
                if value is not None:
                    in_effect.add_metric([view.run_id, name], value)
        yield from (target, outcomes, moves, in_effect)
