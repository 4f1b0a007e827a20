"""Tests of what a window tells of a run, by hand; and the reasons for what it does not."""

from dataclasses import replace

import pytest

from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import RunPolicy
from buffer_service.observability.estimate import estimate
from buffer_service.observability.estimate.quantities import quantities
from buffer_wire.estimate import Unknown
from tests.support.views import make_engines, make_loop, make_view, make_window

WINDOW = {
    "accepted_groups": 400,
    "accepted_samples": 1_600,
    "accepted_response_tokens": 800_000,
    "accepted_longest_tokens": 300_000,
    "assembled_groups": 320,
    "assembled_samples": 1_280,
    "assembled_response_tokens": 640_000,
    "assembled_longest_tokens": 240_000,
    "staleness_sum": 960,
    "pre_queue_staleness_sum": 640,
    "in_queue_staleness_sum": 320,
    "token_staleness_milli_sum": 1_280_000_000,
    "generated_groups": 100,
    "generation_ms": 1_200_000,
    "decoded_tokens": 900_000,
    "decode_busy_ms": 150_000,
    "decode_request_ms": 3_600_000,
    "trainer_busy_ms": 60_000,
    "trainer_wait_ms": 20_000,
}


def test_every_quantity_is_what_it_is_by_hand() -> None:
    window = make_window(publishes=10, seconds=80.0, grown=WINDOW)
    view = make_view(RunPolicy(batch_groups=32, max_queued_groups=48), window=window, engines=make_engines(2))
    known, unknown = quantities(view)
    assert unknown == ()
    # Of one engine 900,000 tokens in 150 s, in 24 requests at a time; there are two.
    assert known.rollout_tokens_per_s == pytest.approx(12_000)
    assert known.concurrency == pytest.approx(48)
    assert known.slot_tokens_per_s == pytest.approx(250)
    assert known.engine_busy_share == pytest.approx(150 / 160)
    assert known.train_tokens_per_s == pytest.approx(640_000 / 60)
    assert known.rho == pytest.approx(1.125)
    assert known.trainer_idle_share == pytest.approx(0.25)
    assert (known.mean_length, known.tailness, known.group_size) == (500, 1.5, 4)
    assert (known.groups_per_batch, known.batches_per_publish, known.queue_factor) == (32, 1, 1.5)
    assert known.concurrency_ratio == pytest.approx(48 / 128)
    assert (known.train_period_s, known.publish_period_s) == (8, 8)
    assert (known.group_generation_s, known.expected_generation_s) == (12, 3)
    assert (known.decoded_tokens_per_s, known.trained_tokens_per_s) == (11_250, 8_000)
    seen = estimate(view).measured
    assert (seen.groups, seen.pre_queue, seen.in_queue, seen.staleness, seen.tokens) == (320, 2, 1, 3, 2)


def test_what_was_counted_before_the_window_does_not_matter() -> None:
    before = dict.fromkeys(WINDOW, 10**9)
    windows = [make_window(publishes=10, seconds=80.0, before=earlier, grown=WINDOW) for earlier in ({}, before)]
    first, second = (quantities(make_view(window=window, engines=make_engines(2))) for window in windows)
    assert first == second


def test_only_engines_that_serve_count() -> None:
    engines = [
        *make_engines(2),
        *make_engines(1, "loading"),
        *make_engines(4, "quarantined"),
        *make_engines(8, "stopped"),
        *make_engines(16, silent_ms=60_000),
    ]
    known, _ = quantities(make_loop(engines=engines))
    assert known.engines == 3


def test_batches_of_a_publish_are_counted_and_those_of_a_token_budget_are_declared() -> None:
    twice, _ = quantities(make_loop(RunPolicy(batch_groups=16, batches_per_publish=2)))
    assert (twice.batches_per_publish, twice.groups_per_batch) == (2, 16)
    assert twice.publish_period_s == pytest.approx(2 * (twice.train_period_s or 0))
    assert twice.concurrency_ratio == pytest.approx(128 / 256)
    budget = RunPolicy(batch_groups=16, batch_tokens=10_000)
    fewer = make_loop(budget, grown={"assembled_groups": 20 * 12})
    by_tokens, _ = quantities(fewer)
    assert (by_tokens.batches_per_publish, by_tokens.groups_per_batch) == (1, 12)


def test_steps_of_their_own_size_are_not_taken_for_several_batches() -> None:
    own = estimate(make_loop(grown={"assembled_groups": 20 * 24}))
    assert (own.predicted.staleness, own.advice, own.verdict.bound) == (None, (), "")
    assert own.unknown[-1] == Unknown("predicted", "steps take batches of other sizes than batch_groups")
    # One batch more at the window's edge, however short it is.
    for publishes in (4, 20):
        edge = estimate(make_loop(publishes=publishes, grown={"assembled_groups": (publishes + 1) * 16}))
        assert edge.predicted.staleness is not None


def test_caps_in_tokens_and_bytes_go_by_the_mean_group() -> None:
    held = {"trained": Amount(groups=10, samples=80, tokens=100_000, bytes=1_000_000)}
    by_tokens, _ = quantities(
        make_loop(RunPolicy(batch_groups=16, max_queued_groups=64, max_queued_tokens=200_000), groups=held)
    )
    assert (by_tokens.queue_cap, by_tokens.queue_factor) == ("max_queued_tokens", 20 / 16)
    by_bytes, _ = quantities(
        make_loop(RunPolicy(batch_groups=16, max_queued_groups=64, max_queued_bytes=2_400_000), groups=held)
    )
    assert (by_bytes.queue_cap, by_bytes.queue_factor) == ("max_queued_bytes", 24 / 16)
    by_groups, _ = quantities(make_loop(RunPolicy(batch_groups=16, max_queued_groups=32), groups=held))
    assert (by_groups.queue_cap, by_groups.queue_factor) == ("max_queued_groups", 2)


def test_of_the_throughput_counts_what_passes_the_filter() -> None:
    policy = RunPolicy(batch_groups=16, filter_equal_rewards=True)
    half, _ = quantities(make_loop(policy, rho=1.4, statistics={"recent_acceptance_ppm": 500_000}))
    assert half.rho == pytest.approx(0.7)
    assert half.concurrency_ratio == pytest.approx(0.5)
    unfiltered, _ = quantities(make_loop(rho=1.4, statistics={"recent_acceptance_ppm": 500_000}))
    assert unfiltered.rho == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("missing", "reason", "names"),
    [
        (
            ("decode_busy_ms", "decoded_tokens", "decode_request_ms"),
            "no worker reports counters",
            {"concurrency", "rho"},
        ),
        (("trainer_busy_ms", "trainer_wait_ms"), "the trainer does not report", {"trainer_idle_share", "rho"}),
        (("generated_groups",), "no group of a lease", {"group_generation_s"}),
        (("accepted_groups", "accepted_samples", "accepted_response_tokens"), "no group was accepted", {"tailness"}),
        (("assembled_groups", "assembled_response_tokens"), "no group was assembled", {"queue_factor", "rho"}),
    ],
)
def test_what_is_missing_has_its_reason(missing: tuple[str, ...], reason: str, names: set[str]) -> None:
    view = make_loop(grown=dict.fromkeys(missing, 0))
    known, unknown = quantities(view)
    found = {one.name for one in unknown if one.reason.startswith(reason)}
    assert names <= found
    assert all(getattr(known, one.name) is None for one in unknown)
    whole = estimate(view)
    if "group_generation_s" not in names:
        assert whole.predicted.staleness is None
        assert (whole.verdict.bound, whole.advice) == ("", ())
        assert "predicted" in {one.name for one in whole.unknown}
    assert quantities(make_loop())[1] == ()


def test_no_engine_that_is_heard_of_is_a_reason_of_its_own() -> None:
    _, unknown = quantities(make_loop(engines=make_engines(2, silent_ms=60_000)))
    assert {one.reason for one in unknown} == {"no ready engine is heard of"}


def test_before_the_second_publish_nothing_is_known_and_before_the_fifth_nothing_predicted() -> None:
    nothing = estimate(make_view())
    assert (nothing.publishes, nothing.measured.staleness, nothing.predicted.staleness) == (0, None, None)
    assert all(one.reason.startswith("fewer than 2 publishes") for one in nothing.unknown)
    few, enough = (estimate(make_loop(publishes=publishes)) for publishes in (3, 4))
    assert (few.predicted.staleness, few.verdict.bound) == (None, "")
    assert few.measured.staleness is not None
    assert [one.reason for one in few.unknown] == ["fewer than 4 publishes since the first one of the window"]
    assert enough.predicted.staleness is not None
    assert enough.verdict.bound == "rollout"


def test_environments_are_measured_over_the_whole_run() -> None:
    sums = {
        "assembled_groups": 10,
        "staleness_sum": 30,
        "pre_queue_staleness_sum": 20,
        "in_queue_staleness_sum": 10,
        "token_staleness_milli_sum": 1_500 * 400,
        "accepted_response_tokens": 500,
        "assembled_response_tokens": 400,
    }
    view = make_loop(environment_statistics={"math": sums, "code": dict.fromkeys(sums, 0)})
    (math,) = estimate(replace(view, window=None)).measured.environments
    assert (math.environment, math.staleness, math.pre_queue, math.in_queue, math.tokens) == ("math", 3, 2, 1, 1.5)
