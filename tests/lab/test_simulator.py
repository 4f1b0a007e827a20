"""The simulator's rules, on settings whose outcome is known by hand; then against the page."""

import dataclasses

import pytest

from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.observability.estimate import closed_forms as cf
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Empirical, Fixed, Lognormal, token_tailness
from buffer_wire.errors import InvalidField
from rollout_lab.processes import in_processes
from rollout_lab.queue_policies import queue_policy

LENGTHS = Lognormal.with_mean(1_400, 0.5)


def run(policy: RunPolicy, workload: Workload, steps: int = 150, warmup: int = 40, seed: int = 0) -> SimulationResult:
    return simulate(Simulation(policy=policy, workload=workload, steps=steps, warmup=warmup, seed=seed))


# ── by hand ─────────────────────────────────────────────────────────────────


def test_synchronous_training_takes_turns() -> None:
    """Equal lengths, one wave a batch: 100 token times to generate, ρ · 100 to train, nothing stale."""
    policy = queue_policy("sync", 4)
    result = run(policy, Workload(8, 2, 0.5, Fixed(100)), steps=20, warmup=0)
    assert (result.staleness, result.staleness_max, result.token_staleness) == (0, 0, 0)
    assert result.train_period_ratio == pytest.approx(1.5)
    assert result.trainer_idle_share == pytest.approx(2 / 3)
    assert result.slot_idle_share == pytest.approx(1 / 3)
    assert result.tailness == 1


def test_one_batch_ahead_overlaps_both_sides() -> None:
    result = run(queue_policy("one_step_off", 4), Workload(8, 2, 0.5, Fixed(100)), steps=20, warmup=2)
    assert result.train_period_ratio == pytest.approx(1.0)
    assert result.staleness_max == 1


def test_a_reload_pause_stops_decoding_and_nothing_else() -> None:
    """Each batch takes a wave of 100 token times, then 50 of training, then 25 of pause."""
    workload = Workload(8, 2, 0.5, Fixed(100), reload_pause=25)
    result = run(queue_policy("sync", 4), workload, steps=20, warmup=1)
    assert result.train_period_ratio == pytest.approx(1.75)


def test_engines_that_learn_late_of_a_publish_make_groups_older_by_the_share_of_a_period() -> None:
    """Many slots, rollout-bound: groups begin at any time, so a fifth of them under weights that are one older."""
    prompt = run(queue_policy("queue_drop", 16), Workload(128, 8, 0.6, LENGTHS), steps=300)
    period = 16 * 8 * LENGTHS.mean / 128
    late = run(queue_policy("queue_drop", 16), Workload(128, 8, 0.6, LENGTHS, publish_lag=period / 5), steps=300)
    assert late.staleness == pytest.approx(prompt.staleness + 0.2, abs=0.04)
    assert late.train_period_ratio == pytest.approx(prompt.train_period_ratio, rel=0.02)


def test_where_a_load_is_short_against_a_period_no_group_begins_with_the_weights_that_it_replaces() -> None:
    workload = Workload(128, 8, 0.6, LENGTHS)
    prompt, late = (
        run(queue_policy("queue_drop", 16), dataclasses.replace(workload, publish_lag=lag), steps=300)
        for lag in (0.0, 16 * 8 * LENGTHS.mean / 128 / 10)
    )
    assert late.staleness == pytest.approx(prompt.staleness, abs=0.02)
    assert late.train_period_ratio == pytest.approx(prompt.train_period_ratio, rel=0.01)


def test_a_fresh_start_is_a_version_where_admission_is_the_limit_and_free_where_the_load_stops_the_engines() -> None:
    workload = Workload(128, 8, 1.0, LENGTHS)
    lag = 0.02 * workload.ideal_period(16, 0)
    on, off = (queue_policy("queue_drop(2)", 16, max_lookahead=1, fresh_start_ms=limit) for limit in (30_000, 0))
    fetched = dataclasses.replace(workload, publish_lag=lag)
    assert run(off, fetched).staleness - run(on, fetched).staleness == pytest.approx(1, abs=0.1)
    stopped = dataclasses.replace(workload, reload_pause=lag)
    assert run(on, stopped) == run(off, stopped)
    assert run(on, stopped).staleness == pytest.approx(1, abs=0.1)


def test_with_fresh_starts_turned_off_groups_begin_with_the_weights_that_a_load_replaces() -> None:
    workload = Workload(128, 8, 0.6, LENGTHS)
    prompt, late = (
        run(queue_policy("queue_drop", 16, fresh_start_ms=0), dataclasses.replace(workload, publish_lag=lag), steps=300)
        for lag in (0.0, 16 * 8 * LENGTHS.mean / 128 / 10)
    )
    assert late.staleness == pytest.approx(prompt.staleness + 0.1, abs=0.03)


def test_of_weights_that_come_faster_than_they_are_loaded_the_newest_are_loaded_next() -> None:
    """A wave of 100 token times a step, loads of 250: versions are three steps old when they are replaced."""
    result = run(queue_policy("queue_drop", 4), Workload(8, 2, 0.5, Fixed(100), publish_lag=250), steps=60, warmup=10)
    assert result.train_period_ratio == pytest.approx(1.0)
    assert 3 < result.staleness < 6


def test_engines_that_have_not_learned_of_a_publish_start_little_in_vain() -> None:
    """Group that the publish admits: it would be two versions old at its turn, so it waits for the weights. Begun at
    once it was 39 % of the tokens, and a period 1.34 times as long.
    """
    workload = Workload(32, 4, 1.0, Lognormal.with_mean(100, 0.5))
    prompt = run(queue_policy("one_step_off", 8), workload)
    late = run(queue_policy("one_step_off", 8), dataclasses.replace(workload, publish_lag=10))
    assert late.wasted_token_share < prompt.wasted_token_share + 0.06
    assert late.train_period_ratio < prompt.train_period_ratio * 1.15


def test_pauses_that_overlap_end_with_the_last() -> None:
    """A pause longer than the period: engines never decode again, but for what is queued already."""
    workload = Workload(8, 2, 2.0, Fixed(100), reload_pause=10_000)
    result = run(queue_policy("queue_drop", 4, queue_factor=3), workload, steps=5, warmup=1)
    assert result.train_period_ratio > 10


def test_turns_wait_for_their_environment_in_the_slot() -> None:
    """Four turns of 25 tokens with three waits of 20: 160 token times a response, of which ρ is taken."""
    workload = Workload(8, 2, 0.5, Fixed(100), turn_tokens=25, turn_latency=20)
    result = run(queue_policy("sync", 4), workload, steps=20, warmup=0)
    assert result.train_period_ratio == pytest.approx(1.5)
    assert result.sampled_mean_length == 100


def test_tokens_of_a_batch_that_spans_an_update_have_the_mean_version() -> None:
    """ρ = 0.5, one wave a batch: the update comes half-way through the next wave's decoding."""
    result = run(queue_policy("queue_drop", 4), Workload(8, 2, 0.5, Fixed(100)), steps=20, warmup=2)
    assert result.staleness == 1
    assert result.token_staleness == pytest.approx(0.5)


def test_prefetched_batches_are_trained_by_later_versions() -> None:
    plain = run(queue_policy("queue_drop", 16, queue_factor=1), Workload(64, 8, 1.3, LENGTHS))
    ahead = run(queue_policy("queue_drop", 16, queue_factor=1, prefetch_batches=2), Workload(64, 8, 1.3, LENGTHS))
    assert ahead.staleness == pytest.approx(plain.staleness + 2, abs=0.25)


def test_micro_batches_pulled_ahead_keep_the_trainer_busy_where_room_is_short_and_are_a_version_older() -> None:
    """Train-bound micro-batches of one group over room for one: between pulls, groups that find it full are dropped."""
    streamed = {"micro_batch": 1, "queue_factor": 1 / 8}
    workload = Workload(64, 8, 1.3, LENGTHS)
    plain = run(queue_policy("streaming", 8, **streamed), workload)  # type: ignore[arg-type]
    ahead = run(queue_policy("streaming", 8, prefetch_batches=1, **streamed), workload)  # type: ignore[arg-type]
    assert plain.trainer_idle_share > 0.05
    assert ahead.trainer_idle_share < 0.01
    # All micro-batches of the next step are there before this one is trained.
    assert ahead.iqs > plain.iqs + 0.8


def test_with_prefetch_every_micro_batch_of_a_step_is_trained_by_the_same_version() -> None:
    """Equal lengths, eight slots, micro-batches of half a batch; rollouts take twice as long as training."""
    policy = queue_policy("streaming", 4, micro_batch=2, prefetch_batches=1)
    result = run(policy, Workload(8, 2, 0.5, Fixed(100)), steps=20, warmup=2)
    # Four groups end together at the end of a wave, 50 token times after the last update: the next one trains on them.
    assert (result.iqs, result.pqs) == (0, 1)
    assert result.train_period_ratio == pytest.approx(1.0)


def test_a_group_begins_when_all_of_its_responses_have_room() -> None:
    """Groups of two with 100 and 200 tokens, one in flight: a slot waits a quarter of the time."""
    workload = Workload(2, 2, 0.1, Empirical(((100, 200),)), groups_in_flight=1)
    result = run(queue_policy("queue_drop", 4), workload, steps=40, warmup=5)
    assert result.slot_idle_share == pytest.approx(0.25, abs=0.01)
    assert result.train_period_ratio == pytest.approx(4 / 3, rel=0.01)
    # As many as slots need: the next group starts as soon as one is free.
    free = run(queue_policy("queue_drop", 4), Workload(2, 2, 0.1, workload.lengths), steps=40, warmup=5)
    assert free.slot_idle_share == 0
    # The last responses of two groups leave room for a third: were groups counted, half of the slots would be idle.
    tails = Workload(8, 4, 0.1, Empirical(((100, 100, 100, 300),)), groups_in_flight=2)
    assert run(queue_policy("queue_drop", 4), tails, steps=40, warmup=5).slot_idle_share == pytest.approx(
        0.25, abs=0.01
    )


def test_groups_in_flight_that_slots_never_reach_change_nothing() -> None:
    plain = run(queue_policy("queue_drop", 8), Workload(64, 8, 0.8, LENGTHS))
    ahead = run(queue_policy("queue_drop", 8), Workload(64, 8, 0.8, LENGTHS, groups_in_flight=64))
    assert dataclasses.replace(ahead, mean_leased=plain.mean_leased) == plain


def test_what_is_leased_ahead_begins_with_the_weights_that_a_load_replaces() -> None:
    """Fresh starts hold back leases, not what was leased before: slots take it for a tenth of a period."""
    period = 16 * 8 * LENGTHS.mean / 128
    work = Workload(128, 8, 0.6, LENGTHS, publish_lag=period / 10)
    at_once, ahead = (
        run(queue_policy("queue_drop", 16), dataclasses.replace(work, groups_in_flight=groups), steps=300)
        for groups in (0, 64)
    )
    assert ahead.staleness == pytest.approx(at_once.staleness + 0.1, abs=0.04)
    assert ahead.mean_leased > 2 * at_once.mean_leased


@pytest.mark.parametrize("action", [OverflowAction.BLOCK, OverflowAction.REJECT])
def test_where_pushes_wait_groups_are_as_old_as_workers_hold_leases(action: OverflowAction) -> None:
    """Training is the bottleneck: 24 leases and a queue of 8 groups, trained by 8, in the order in which they came."""
    policy = RunPolicy(batch_groups=8, overflow_action=action)
    work = Workload(32, 4, 1.5, LENGTHS, groups_in_flight=12, groups_outstanding=24)
    result = run(policy, work)
    assert result.staleness == pytest.approx((24 + 8) / 8, abs=0.03)
    assert result.mean_leased == pytest.approx(24, abs=0.5)
    assert result.mean_concurrency == pytest.approx(32 / 1.5, rel=0.05)


def test_in_flight_cap_limits_the_slots_in_use() -> None:
    workload = Workload(64, 8, 0.6, LENGTHS)
    result = run(queue_policy("queue_drop", 8, max_inflight_groups=4), workload)
    assert result.slot_idle_share > 0.5
    assert result.pqs < run(queue_policy("queue_drop", 8), workload).pqs


def test_the_last_in_first_order_trains_on_fresher_groups() -> None:
    workload = Workload(64, 8, 1.5, LENGTHS)
    fifo, lifo = (
        run(queue_policy("queue_drop", 8, queue_factor=2, order=order), workload) for order in ("fifo", "lifo")
    )
    assert lifo.iqs < fifo.iqs


def test_a_gate_bounds_staleness_and_prefers_short_responses() -> None:
    result = run(queue_policy("queue_max", 16, max_staleness=1), Workload(128, 8, 1.0, LENGTHS))
    assert result.staleness_max == 1
    assert result.length_bias < -0.03
    assert result.dropped_groups > 0


def test_recycled_groups_are_generated_again() -> None:
    policy = queue_policy("miles_docs(1)", 16)
    result = run(policy, Workload(128, 8, 1.0, LENGTHS))
    assert (result.dropped_groups, result.staleness_max) == (0, 1)
    assert result.recycled_groups > 0


def test_recorded_lengths_are_played() -> None:
    result = run(queue_policy("queue_drop", 4), Workload(16, 2, 0.7, Empirical(((10, 90), (50, 50)))))
    assert result.sampled_mean_length == pytest.approx(50)
    assert result.sampled_max_length == 90
    assert result.tailness == pytest.approx(1.4, abs=0.05)


def test_a_seed_means_the_same_also_on_several_processes() -> None:
    simulations = [
        Simulation(policy=queue_policy("queue_drop", 4), workload=Workload(16, 2, 0.7, LENGTHS), steps=30, seed=seed)
        for seed in (1, 2, 1)
    ]
    told: list[int] = []
    one, two, again = in_processes(simulate, simulations, processes=2, done=told.append)
    assert (one, two) == (simulate(simulations[0]), simulate(simulations[1]))
    assert one == again
    assert told == [1, 2, 3]


def test_warmup_is_not_counted() -> None:
    simulation = Simulation(policy=queue_policy("queue_drop", 4), workload=Workload(16, 2, 0.7, LENGTHS), steps=30)
    result = simulate(simulation)
    assert sum(result.staleness_counts) == 30 * 4
    assert (result.steps, result.warmup) == (30, 100)
    assert simulate(dataclasses.replace(simulation, warmup=0)).staleness_counts[0] >= 4


@pytest.mark.parametrize(
    "fields",
    [
        {"overflow_action": OverflowAction.REJECT},
        {"max_staleness": 2, "cancel_stale_leases": True},
        {"batch_tokens": 100},
        {"quota_groups": 1_000},
    ],
)
def test_what_is_not_simulated_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidField, match="to be simulated"):
        run(RunPolicy(batch_groups=4, **fields), Workload(8, 2, 1.0, LENGTHS))  # type: ignore[arg-type]


# ── against the closed forms ────────────────────────────────────────────────


@pytest.mark.parametrize("rho", [0.67, 0.85, 1.07, 1.5])
def test_streaming_of_the_page(rho: float) -> None:
    """N = 32, G = 8, C = 256, σ 0.5, micro-batches of 4 over a queue of 8 groups."""
    published = {0.67: (0.66, 0.09, 1.00), 0.85: (0.83, 0.13, 1.01), 1.07: (0.98, 0.19, 1.02), 1.5: (1.00, 0.19, 1.00)}
    workload = Workload(256, 8, rho, LENGTHS)
    whole = run(queue_policy("queue_drop", 32, queue_factor=1), workload)
    streamed = run(queue_policy("streaming", 32, micro_batch=4), workload)
    iqs, streamed_iqs, period = published[rho]
    assert whole.iqs == pytest.approx(iqs, abs=0.03)
    assert streamed.iqs == pytest.approx(streamed_iqs, abs=0.03)
    assert streamed.train_period_ratio == pytest.approx(period, abs=0.015)
    assert streamed.length_bias == pytest.approx(0, abs=0.015)


@pytest.mark.parametrize("queue", [2, 3])
@pytest.mark.parametrize("rho", [0.5, 0.8, 1.2, 1.5, 2.5])
def test_streaming_agrees_with_its_closed_form(rho: float, queue: int) -> None:
    policy = queue_policy("streaming", 32, micro_batch=4, queue_factor=queue * 4 / 32)
    result = run(policy, Workload(256, 8, rho, LENGTHS), steps=100)
    predicted = cf.streaming(1.0, 4 / 32, queue, rho, LENGTHS.tailness(8))
    assert result.iqs == pytest.approx(predicted.iqs, abs=0.06)
    assert result.staleness == pytest.approx(predicted.staleness, abs=0.1)
    tokens = cf.token_staleness(predicted, 1.0, rho, token_tailness(LENGTHS, 8), LENGTHS.variation)
    assert result.token_staleness == pytest.approx(tokens, abs=0.1)


@pytest.mark.parametrize("rho", [0.6, 0.8, 1.3])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_admission_agrees_with_its_closed_form(eta: int, ratio: float, rho: float) -> None:
    """Without a gate; the period of η >= 1 is a lower bound only."""
    policy = RunPolicy(
        batch_groups=16, max_lookahead=eta, max_queued_groups=(eta + 1) * 16, overflow_action=OverflowAction.BLOCK
    )
    result = run(policy, Workload(int(ratio * 128), 8, rho, LENGTHS), steps=60, warmup=30)
    batch_tailness = LENGTHS.tailness(min(128, int(ratio * 128)))
    predicted = cf.admission_limited(ratio, eta, rho, LENGTHS.tailness(8), batch_tailness)
    assert result.staleness == pytest.approx(predicted.staleness, abs=0.1)
    assert result.dropped_groups == 0
    if eta == 0:
        assert result.train_period_ratio == pytest.approx(predicted.train_period_ratio, rel=0.05)
    else:
        assert result.train_period_ratio > predicted.train_period_ratio - 0.02


def test_surplus_responses_end_with_the_first_g_and_their_slots_are_free_at_once() -> None:
    """Groups of 100, 200 and 900 tokens of which two make the group, alone in three slots: 200 token times each."""
    lengths = Empirical(((100, 200, 900),))
    workload = Workload(3, 2, 0.1, lengths, surplus=1, groups_in_flight=2)
    result = run(queue_policy("queue_drop", 4), workload, steps=40, warmup=5)
    assert (result.sampled_mean_length, result.trained_mean_length) == (400, 150)
    assert result.length_bias == pytest.approx(-0.625)
    assert result.trained_max_length == 200
    # 200 of the 900 tokens are made.
    assert result.surplus_token_share == result.wasted_token_share == pytest.approx(200 / 500)
    rollout = workload.rollout_time(4, 0)
    assert result.train_period_ratio * rollout == pytest.approx(4 * 200, rel=0.02)


def test_without_surplus_nothing_is_cut() -> None:
    result = run(queue_policy("queue_drop", 8), Workload(64, 8, 0.8, LENGTHS))
    assert result.surplus_token_share == 0
