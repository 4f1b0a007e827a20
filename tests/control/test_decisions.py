"""Decisions of the controller: what it moves in which order, how far, how often, and when it gives up."""

from dataclasses import replace
from typing import Any

import pytest

from buffer_service.control.decision import LEAST_PUBLISHES, decide
from buffer_service.domain.policy import RunPolicy, TargetMeasure
from buffer_service.domain.steering.decisions import Decision, Outcome, Situation
from buffer_service.domain.steering.knobs import Knobs, in_effect, lookahead_milli
from buffer_service.domain.window import Snapshot
from buffer_service.rules.totals import TOTALS

N = 16
GROUPS = 1_000
POLICY = RunPolicy(batch_groups=N, max_queued_groups=4 * N, target_staleness_milli=2_000)


def situation(policy: RunPolicy, knobs: Knobs | None, staleness: float, *, held: bool, **means: float) -> Situation:
    """A run that published 40 versions and moved long ago; every publish was as stale as the others."""
    leased = means.get("leased", 1.0)
    grown = {
        "assembled_groups": GROUPS,
        "assembled_response_tokens": GROUPS,
        "accepted_groups": GROUPS,
        "generated_groups": round(leased * GROUPS),
        "generation_ms": round(means.get("in_flight", 2 * N) * 1_000),
        "staleness_sum": round(staleness * GROUPS),
        "token_staleness_milli_sum": round(means.get("token", staleness) * 1_000 * GROUPS),
        "pre_queue_staleness_sum": round(staleness / 2 * GROUPS),
        "in_queue_staleness_sum": round(staleness / 2 * GROUPS),
    }
    snapshots = [
        Snapshot(1_000 * version, version, {name: version * grown.get(name, 0) for name in TOTALS})
        for version in range(20, 41)
    ]
    decided = Decision(
        version=39,
        moved_at=10,
        moves=1,
        target_milli=policy.target_staleness_milli,
        by_token=policy.target_measure is TargetMeasure.TOKEN,
        knobs=knobs or Knobs(lookahead_milli=policy.target_staleness_milli),
    )
    return Situation(
        policy=policy, world_size=1, version=40, decided=decided, snapshots=snapshots, held_at=40 if held else -1
    )


def decided(policy: RunPolicy = POLICY, staleness: float = 2.0, *, held: bool = True, **rest: Any) -> Decision:
    return decide(situation(policy, rest.pop("knobs", None), staleness, held=held, **rest))


def test_it_begins_with_a_lookahead_at_the_target() -> None:
    begun = decide(replace(situation(POLICY, None, 9.0, held=False), decided=Decision()))
    assert (begun.outcome, begun.knobs) == (Outcome.MOVED, Knobs(lookahead_milli=2_000))
    assert begun.moved_at == begun.version == 40


def test_another_target_begins_anew() -> None:
    other = replace(POLICY, target_staleness_milli=3_000)
    begun = decide(replace(situation(POLICY, Knobs(lookahead_milli=400), 1.0, held=True), policy=other))
    assert (begun.knobs.lookahead_milli, begun.moves) == (3_000, 2)


@pytest.mark.parametrize("staleness", [1.9, 2.0, 2.1])
def test_near_the_target_nothing_moves(staleness: float) -> None:
    kept = decided(staleness=staleness)
    assert (kept.outcome, kept.moved_at, kept.measured_milli) == (Outcome.HOLDING, 10, round(1_000 * staleness))


@pytest.mark.parametrize(("staleness", "moved"), [(2.5, -350), (9.0, -1_000), (1.5, 350), (0.1, 1_000)])
def test_the_lookahead_makes_up_for_a_part_of_what_is_off_and_never_for_much(staleness: float, moved: int) -> None:
    assert decided(staleness=staleness).knobs.lookahead_milli == 2_000 + moved


def test_nothing_moves_before_the_last_move_shows() -> None:
    stale = situation(POLICY, None, 5.0, held=True)
    for moved_at in range(10, 41):
        waits = decide(replace(stale, decided=replace(stale.decided, moved_at=moved_at)))
        shows = moved_at + 2 + 1
        assert (waits.outcome is Outcome.SETTLING) == (40 - shows < LEAST_PUBLISHES), moved_at


def test_a_mean_over_few_publishes_is_believed_less() -> None:
    near = situation(POLICY, None, 2.15, held=True)
    few = replace(near, snapshots=near.snapshots[-(LEAST_PUBLISHES + 1) :])
    assert [decide(one).outcome for one in (near, few)] == [Outcome.MOVED, Outcome.HOLDING]


def test_a_correction_that_turns_back_is_half_of_the_last_one_and_one_that_goes_on_is_twice_of_it() -> None:
    stale = situation(POLICY, None, 3.0, held=True)
    paces = {}
    for before in (0, -1_000, 1_000, -250, 100, -100):
        moved = decide(replace(stale, decided=replace(stale.decided, pace_milli=before)))
        paces[before] = moved.pace_milli
        assert moved.knobs.lookahead_milli == 2_000 + round(0.7 * moved.pace_milli)
    assert paces == {0: -1_000, -1_000: -1_000, 1_000: -500, -250: -500, 100: -100, -100: -200}


def test_a_run_that_nothing_holds_back_is_fresher_and_left_alone() -> None:
    assert decided(staleness=1.0, held=False).outcome is Outcome.OPEN


def test_tokens_are_measured_where_the_target_is_about_them() -> None:
    policy = replace(POLICY, target_measure=TargetMeasure.TOKEN)
    assert decided(policy, 2.6, token=2.0).outcome is Outcome.HOLDING
    assert decided(policy, 2.0, token=1.5).knobs.lookahead_milli == 2_350


def test_smaller_micro_batches_come_first_and_only_where_the_policy_streams() -> None:
    streamed = replace(POLICY, micro_batch_groups=8)
    smaller = decided(streamed, 3.0)
    assert smaller.knobs == Knobs(lookahead_milli=2_000, micro_batch_groups=4)
    assert decided(streamed, 2.0).knobs == smaller.knobs, "they cost no throughput, which what holds engines back does"
    least = Knobs(lookahead_milli=2_000, micro_batch_groups=2)
    assert decided(streamed, 3.0, knobs=least).knobs.micro_batch_groups == 2, "an eighth of a batch"
    assert decided(POLICY, 3.0).knobs.micro_batch_groups == 0


def test_micro_batches_grow_again_where_nothing_is_held_back() -> None:
    streamed = replace(POLICY, micro_batch_groups=8)
    small = Knobs(lookahead_milli=2_000, micro_batch_groups=2)
    assert decided(streamed, 1.0, held=False, knobs=small).knobs.micro_batch_groups == 4
    assert decided(streamed, 1.85, held=False, knobs=small).outcome is Outcome.OPEN, "they would pass the target"


def test_the_queues_room_moves_where_groups_come_without_leases() -> None:
    assert decided(staleness=3.0, leased=0.0).knobs.max_queued_groups == 42
    least = Knobs(lookahead_milli=2_000, max_queued_groups=N)
    assert decided(staleness=3.0, leased=0.0, knobs=least).outcome is Outcome.OUT_OF_REACH
    assert decided(staleness=1.0, leased=0.0, held=False, knobs=least).knobs.max_queued_groups == 26


def test_the_limit_in_flight_moves_when_the_lookahead_is_at_its_least_and_never_below_a_batch() -> None:
    ahead = replace(POLICY, prefetch_batches=1, target_staleness_milli=500)
    least = Knobs(lookahead_milli=1_000)
    assert decided(ahead, 1.0, knobs=least).knobs == Knobs(lookahead_milli=1_000, max_inflight_groups=19)
    limited = Knobs(lookahead_milli=1_000, max_inflight_groups=N)
    given_up = decided(ahead, 1.0, knobs=limited)
    assert given_up.outcome is Outcome.OUT_OF_REACH
    assert given_up.reason.endswith(
        "0.50 versions are too many; prefetch_batches 0 takes away up to 0.50, batch_groups 32 takes away up to 0.50, "
        "micro_batch_groups 2 takes away up to 0.44"
    )


@pytest.mark.parametrize(
    ("ranks", "named"), [(2, "micro_batch_groups 1 takes away up to 0.44"), (8, "up to 0.25"), (16, "")]
)
def test_micro_batches_are_named_by_rank_and_not_where_one_group_a_rank_is_a_batch(ranks: int, named: str) -> None:
    ahead = replace(POLICY, prefetch_batches=1, target_staleness_milli=500)
    stale = situation(ahead, Knobs(lookahead_milli=1_000, max_inflight_groups=N), 1.0, held=True)
    given_up = decide(replace(stale, world_size=ranks))
    assert given_up.outcome is Outcome.OUT_OF_REACH
    assert given_up.reason.endswith(named)
    assert ("micro_batch_groups" in given_up.reason) == bool(named)


def test_what_costs_most_is_given_back_first() -> None:
    limited = Knobs(lookahead_milli=1_000, max_inflight_groups=20)
    back = decided(staleness=1.0, knobs=limited)
    assert back.knobs == Knobs(lookahead_milli=1_000, max_inflight_groups=34)
    assert decided(staleness=1.0, held=False, knobs=limited).knobs == Knobs(lookahead_milli=1_000)


@pytest.mark.parametrize("stated", [{"max_lookahead": 1}, {"max_inflight_groups": 5}, {"max_queued_groups": 20}])
def test_what_the_policy_states_is_never_exceeded(stated: dict[str, int]) -> None:
    policy = replace(POLICY, **stated)  # type: ignore[arg-type]
    knobs = Knobs(lookahead_milli=9_000, max_inflight_groups=99, max_queued_groups=999, micro_batch_groups=9)
    lowered = in_effect(policy, knobs, 1)
    for name, value in stated.items():
        assert getattr(lowered, name) == value
    assert lookahead_milli(replace(policy, max_lookahead=3), knobs) == 3_000
    assert decided(replace(policy, max_lookahead=2), 1.0).knobs.lookahead_milli <= 2_000


def test_a_resume_that_puts_the_clock_back_does_not_stop_it() -> None:
    late = situation(POLICY, None, 3.0, held=True)
    resumed = decide(replace(late, decided=replace(late.decided, version=90, moved_at=88)))
    assert (resumed.outcome, resumed.moved_at) == (Outcome.SETTLING, 40)
