"""Metrics of staleness, from views that the test makes up."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from buffer_service.admin.metrics.staleness import StalenessCollector
from buffer_service.domain.ops import RunView
from buffer_service.domain.window import no_staleness
from buffer_service.observability.estimate import estimate
from buffer_service.rules.totals import LENGTH_BUCKETS
from tests.support.views import make_loop, make_view


def values(view: RunView) -> dict[tuple[str, ...], float]:
    """Values by metric name and labels' values, without that of the run, as a scrape reads them."""
    registry = CollectorRegistry()
    registry.register(StalenessCollector([view]))
    return {
        (
            sample.name.removeprefix("rollout_buffer_"),
            *(value for name, value in sorted(sample.labels.items()) if name != "run"),
        ): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_the_metrics_are_the_estimate() -> None:
    view = make_loop(rho=0.5, pre_queue=2.0, in_queue=0.5, grown={"assembled_response_tokens": 2_048_000})
    seen, found = values(view), estimate(view)
    assert seen["staleness_measured_versions", "pre_queue"] == found.measured.pre_queue == 2.0
    assert seen["staleness_measured_versions", "in_queue"] == found.measured.in_queue == 0.5
    assert seen["staleness_predicted_versions", "pre_queue"] == found.predicted.pre_queue
    assert seen["staleness_predicted_versions", "in_queue"] == found.predicted.in_queue
    assert seen["staleness_tokens_measured_versions",] == found.measured.tokens
    known = found.quantities
    assert seen["utilization_ratio",] == known.rho
    assert seen["tailness_ratio",] == known.tailness
    assert seen["concurrency_requests",] == known.concurrency
    assert seen["queue_factor_ratio",] == known.queue_factor
    assert seen["group_generation_mean_seconds",] == known.group_generation_s
    assert seen["train_period_seconds",] == known.train_period_s
    assert seen["trainer_idle_ratio",] == known.trainer_idle_share
    assert seen["engine_busy_ratio",] == known.engine_busy_share
    assert seen["decoded_tokens_per_second",] == known.decoded_tokens_per_s
    assert seen["trained_tokens_per_second",] == known.trained_tokens_per_s
    assert seen["length_bias_ratio",] == 0.8
    assert seen["sampling_biased",] == 1
    assert values(make_loop())["sampling_biased",] == 0


def test_what_is_not_known_is_absent() -> None:
    seen = values(make_view())
    assert not {name for name, *_ in seen if name.startswith(("staleness_", "utilization", "trainer_idle", "length"))}
    assert ("sampling_biased",) not in seen


def test_response_lengths_are_a_histogram() -> None:
    counts = [0] * LENGTH_BUCKETS
    counts[0], counts[3], counts[-1] = 2, 5, 1
    seen = values(make_view(response_lengths=counts, statistics={"accepted_response_tokens": 4_194_400}))
    buckets = {labels[0]: value for (name, *labels), value in seen.items() if name == "response_length_tokens_bucket"}
    assert (buckets["1.0"], buckets["4.0"], buckets["8.0"], buckets["2097152.0"], buckets["+Inf"]) == (2, 2, 7, 7, 8)
    assert len(buckets) == LENGTH_BUCKETS
    assert seen["response_length_tokens_count",] == 8
    assert seen["response_length_tokens_sum",] == 4_194_400


def test_sums_are_there_by_stage() -> None:
    statistics = {"accepted_turns": 7, "assembled_turns": 5, "assembled_groups": 3, "accepted_reward_milli": -1_500}
    seen = values(make_view(statistics=statistics))
    assert (seen["summed_turns_total", "accepted"], seen["summed_turns_total", "assembled"]) == (7, 5)
    assert seen["summed_groups_total", "assembled"] == 3
    assert (seen["summed_rewards", "accepted"], seen["summed_rewards", "assembled"]) == (-1.5, 0)


def test_staleness_has_cumulative_buckets_of_groups_and_of_tokens() -> None:
    counts = {**no_staleness(), "total": [3, 0, 2, 0, 0, 1, 0, 0, 0, 4], "token": [0, 50, 0, 0, 0, 0, 0, 0, 7, 0]}
    sums = {"staleness_sum": 130, "in_queue_staleness_sum": 4, "token_staleness_milli_sum": 162_500}
    seen = values(make_view(staleness_counts=counts, statistics=sums))
    ends = ("0.0", "1.0", "2.0", "3.0", "4.0", "6.0", "8.0", "12.0", "16.0", "+Inf")
    groups = [seen["group_staleness_versions_bucket", end, "total"] for end in ends]
    assert groups == [3, 3, 5, 5, 5, 6, 6, 6, 6, 10]
    assert seen["group_staleness_versions_count", "total"] == 10
    assert seen["group_staleness_versions_sum", "total"] == 130
    assert seen["group_staleness_versions_sum", "in_queue"] == 4
    assert [seen["token_staleness_versions_bucket", end] for end in ("0.0", "1.0", "12.0", "16.0")] == [0, 50, 50, 57]
    assert seen["token_staleness_versions_sum",] == 162.5
