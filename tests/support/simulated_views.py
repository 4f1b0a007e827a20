"""Views of runs that were simulated: what the service would have counted of them.

Times are token times, taken for milliseconds. An engine is busy whenever a slot of its is, pauses for loads included;
here all slots are one engine's.
"""

from dataclasses import replace
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction
from buffer_service.rules.totals import RELOAD_PHASES
from buffer_service.simulator import Simulation, SimulationResult, simulate
from tests.support.views import make_engines, make_view, make_window


def simulated_view(simulation: Simulation, **fields: Any) -> tuple[ops.RunView, SimulationResult]:
    """A run of which the window holds what was simulated after the warm-up."""
    result = simulate(simulation)
    policy, work = simulation.policy, simulation.workload
    steps = simulation.steps
    rollout_ms = policy.batch_groups * work.group_size * work.mean_duration(simulation.seed) / work.concurrency
    window_ms = steps * rollout_ms * max(1.0, work.rho) * result.train_period_ratio
    groups = steps * policy.batch_groups
    tokens = groups * work.group_size * result.trained_mean_length
    period_ms = window_ms / steps * policy.batches_per_publish
    load_ms = work.publish_lag + work.reload_pause
    loads = round(window_ms / max(period_ms, load_ms))
    slot_ms = window_ms - loads * work.reload_pause
    decoding = slot_ms * work.concurrency * (1 - result.slot_idle_share)
    busy_ms = decoding / result.mean_concurrency * window_ms / slot_ms
    sampled = round(decoding / result.sampled_mean_length / work.group_size)
    publishes = steps // policy.batches_per_publish
    grown = {
        "accepted_groups": sampled,
        "accepted_samples": sampled * work.group_size,
        "accepted_response_tokens": round(decoding),
        "accepted_longest_tokens": round(sampled * result.tailness * result.sampled_mean_length),
        "accepted_turns": sampled * work.group_size,
        "assembled_groups": groups,
        "assembled_samples": groups * work.group_size,
        "assembled_response_tokens": round(tokens),
        "assembled_turns": groups * work.group_size,
        "staleness_sum": round(result.staleness * groups),
        "pre_queue_staleness_sum": round(result.pqs * groups),
        "in_queue_staleness_sum": round(result.iqs * groups),
        "token_staleness_milli_sum": round(result.token_staleness * 1000 * tokens),
        "generated_groups": sampled,
        "generation_ms": round(result.mean_leased * window_ms),
        "decoded_tokens": round(decoding),
        "decode_busy_ms": round(busy_ms),
        "decode_request_ms": round(busy_ms * result.mean_concurrency),
        "trainer_busy_ms": round(window_ms * (1 - result.trainer_idle_share)),
        "trainer_wait_ms": round(window_ms * result.trainer_idle_share),
    }
    window = make_window(publishes=publishes, seconds=window_ms / 1000, grown=grown)
    of_phase = {"wait": work.publish_lag, "load": work.reload_pause}
    reloads = [number for phase in RELOAD_PHASES for number in (loads, round(loads * of_phase.get(phase, 0.0)))]
    # A queue that lets pushes wait for a trainer that never does is always full.
    full = policy.overflow_action is not OverflowAction.DROP_OLDEST and result.trainer_idle_share < 0.01
    queued = {"queued": ops.Amount(groups=policy.max_queued_groups)} if full else {}
    view = make_view(
        policy, window=window, engines=make_engines(1), world_size=1, reload_counters=reloads, groups=queued
    )
    return replace(view, **fields), result
