"""Estimates of the runs as Prometheus metrics; labels: run, and small fixed sets. What is not known is absent."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from buffer_service.domain.ops import RunView
from buffer_service.observability.estimate import Estimate
from buffer_service.observability.forecasts import FORECASTS
from buffer_service.rules.totals import STALENESS_BOUNDS
from buffer_wire.estimate import Bias

Value = Callable[[Estimate], float | None]

_GAUGES: dict[str, tuple[str, Value]] = {
    "staleness_tokens_measured_versions": (
        "Mean staleness of response tokens, over the window.",
        lambda e: e.measured.tokens,
    ),
    "staleness_prediction_tolerance_versions": (
        "How far measured and predicted staleness may be apart with nothing going on that the prediction misses.",
        lambda e: e.predicted.tolerance,
    ),
    "utilization_ratio": ("Rollout over train throughput, both while busy.", lambda e: e.quantities.rho),
    "tailness_ratio": (
        "Mean longest response of a group over the mean response, as sampled.",
        lambda e: e.quantities.tailness,
    ),
    "concurrency_requests": (
        "Requests that all engines decode at once, while they decode.",
        lambda e: e.quantities.concurrency,
    ),
    "queue_factor_ratio": (
        "Groups that the queue has room for over those of a batch.",
        lambda e: e.quantities.queue_factor,
    ),
    "group_generation_mean_seconds": (
        "Mean time from a group's lease to its acceptance.",
        lambda e: e.quantities.group_generation_s,
    ),
    "train_period_seconds": ("Time from batch to batch.", lambda e: e.quantities.train_period_s),
    "trainer_idle_ratio": (
        "Share of its time that the trainer waits for a batch.",
        lambda e: e.quantities.trainer_idle_share,
    ),
    "engine_busy_ratio": (
        "Share of the window in which an engine decodes anything.",
        lambda e: e.quantities.engine_busy_share,
    ),
    "decoded_tokens_per_second": ("Tokens that engines decode.", lambda e: e.quantities.decoded_tokens_per_s),
    "trained_tokens_per_second": (
        "Response tokens of assembled groups.",
        lambda e: e.quantities.trained_tokens_per_s,
    ),
    "length_bias_ratio": ("Mean response length, trained over sampled.", lambda e: _ratio(e, "mean_length")),
    "sampling_biased": (
        "1 where what is trained differs from what is sampled beyond chance.",
        lambda e: _biased(e.bias),
    ),
}

_SUMS = {
    "groups": ("summed_groups", "Groups."),
    "samples": ("summed_samples", "Samples."),
    "response_tokens": ("summed_response_tokens", "Response tokens."),
    "longest_tokens": ("summed_longest_tokens", "Tokens of each group's longest response."),
    "turns": ("summed_turns", "Turns of role assistant."),
    "truncated_samples": ("summed_truncated_samples", "Samples that ended at their length limit."),
}
_GROUP_STALENESS = {
    "total": "staleness_sum",
    "pre_queue": "pre_queue_staleness_sum",
    "in_queue": "in_queue_staleness_sum",
}
"""Parts of a group's staleness, and their sums."""

_STAGES = ("accepted", "assembled")


class StalenessCollector(Collector):
    """Metrics of views that were read before: collecting does no I/O."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self._views = views

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        """Yield the metric families of staleness."""
        estimates = [(view.run_id, FORECASTS.estimate(view)) for view in self._views]
        for kind in ("measured", "predicted"):
            yield self._staleness(kind, estimates)
        for name, (text, value) in _GAUGES.items():
            family = GaugeMetricFamily(f"rollout_buffer_{name}", text, labels=["run"])
            for run_id, one in estimates:
                number = value(one)
                if number is not None:
                    family.add_metric([run_id], number)
            yield family
        yield self._lengths()
        yield from self._histograms()
        yield from self._sums()

    def _staleness(self, kind: str, estimates: Sequence[tuple[str, Estimate]]) -> GaugeMetricFamily:
        source = (
            "assembled groups of the window"
            if kind == "measured"
            else "a group by a simulation of the run, or the closed form"
        )
        family = GaugeMetricFamily(
            f"rollout_buffer_staleness_{kind}_versions",
            f"Mean staleness of {source}, by part; their sum is the staleness of the head.",
            labels=["run", "part"],
        )
        for run_id, one in estimates:
            for part in ("pre_queue", "in_queue"):
                number = getattr(getattr(one, kind), part)
                if number is not None:
                    family.add_metric([run_id, part], number)
        return family

    def _lengths(self) -> HistogramMetricFamily:
        """Bucket i ends at 2**i tokens, but for the last, which has no end."""
        family = HistogramMetricFamily(
            "rollout_buffer_response_length_tokens", "Response tokens of accepted samples.", labels=["run"]
        )
        for view in self._views:
            counts = list(accumulate(view.response_lengths))
            if counts:
                ends = [*(str(float(2**i)) for i in range(len(counts) - 1)), "+Inf"]
                total = view.statistics["accepted_response_tokens"]
                family.add_metric([view.run_id], buckets=list(zip(ends, counts, strict=True)), sum_value=total)
        return family

    def _histograms(self) -> Iterator[HistogramMetricFamily]:
        groups = HistogramMetricFamily(
            "rollout_buffer_group_staleness_versions",
            "Groups of assembled steps by staleness: total is train version minus head version, pre_queue tail minus "
            "head, in_queue train minus tail.",
            labels=["run", "part"],
        )
        tokens = HistogramMetricFamily(
            "rollout_buffer_token_staleness_versions",
            "Response tokens of assembled steps by train version minus the version that made the token.",
            labels=["run"],
        )
        for view in self._views:
            for part, total in _GROUP_STALENESS.items():
                groups.add_metric([view.run_id, part], *_histogram(view, part, view.statistics[total]))
            mean = view.statistics["token_staleness_milli_sum"] / 1000
            tokens.add_metric([view.run_id], *_histogram(view, "token", mean))
        yield from (groups, tokens)

    def _sums(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["run", "stage"]
        for total, (name, text) in _SUMS.items():
            family = CounterMetricFamily(
                f"rollout_buffer_{name}", f"{text} By stage: accepted, assembled.", labels=labels
            )
            for view in self._views:
                for stage in _STAGES:
                    family.add_metric([view.run_id, stage], view.statistics[f"{stage}_{total}"])
            yield family
        rewards = GaugeMetricFamily(
            "rollout_buffer_summed_rewards",
            "Sum of the samples' rewards. By stage: accepted, assembled.",
            labels=labels,
        )
        for view in self._views:
            for stage in _STAGES:
                rewards.add_metric([view.run_id, stage], view.statistics[f"{stage}_reward_milli"] / 1000)
        yield rewards


def _histogram(view: RunView, counted: str, total: float) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum."""
    ends = [*(str(float(bound)) for bound in STALENESS_BOUNDS), "+Inf"]
    return list(zip(ends, accumulate(view.staleness_counts[counted]), strict=True)), total


def _biased(bias: Bias) -> bool | None:
    """Test whether anything is biased; None where nothing could be tested yet."""
    tested = [one for one in (*bias.comparisons, *bias.environments) if one.chance is not None]
    return any(one.biased for one in tested) if tested else None


def _ratio(one: Estimate, name: str) -> float | None:
    return next((found.ratio for found in one.bias.comparisons if found.name == name), None)
