import random
from functools import partial
from typing import Any

import pytest

from buffer_service.domain.admission import NO_OPEN_STEP, OpenStep, capacity, required_version
from buffer_service.domain.gate import age_milli, aged_out, oldest_useful_version, too_stale
from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import Order, RunPolicy, StalenessMeasure
from buffer_service.domain.quota import within_caps
from buffer_service.domain.timeline import next_train_version


def test_without_caps_there_is_no_capacity_to_run_out_of() -> None:
    assert capacity(RunPolicy(), unpublished_steps=9, open_step=NO_OPEN_STEP, queued=99, leased=99) is None


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        ({"max_inflight_groups": 10}, 10 - 3),
        ({"max_queued_groups": 20, "reserve_queue_space": True}, 20 - (5 + 3)),
        ({"max_lookahead": 2}, (2 + 1 - 1) * 4 - (5 + 3)),
        ({"max_lookahead": 2, "batches_per_publish": 3}, ((2 + 1) * 3 - 1) * 4 - (5 + 3)),
        ({"max_lookahead": 2, "max_inflight_groups": 3}, 3 - 3),
        ({"max_lookahead": 1, "max_inflight_groups": 9}, (1 + 1 - 1) * 4 - (5 + 3)),
    ],
)
def test_capacity_is_the_smallest_room_under_the_caps_that_are_set(policy: dict[str, int], room: int) -> None:
    rules = RunPolicy(batch_groups=4, **policy)  # type: ignore[arg-type]
    assert capacity(rules, unpublished_steps=1, open_step=NO_OPEN_STEP, queued=5, leased=3) == room


@pytest.mark.parametrize(("target", "size"), [(3, 4), (4, 4), (6, 6)])
def test_an_open_step_counts_what_it_has_and_is_as_large_as_it_is_to_become(target: int, size: int) -> None:
    rules = RunPolicy(batch_groups=4, max_lookahead=1)
    open_step = OpenStep(target, groups=2)
    assert capacity(rules, unpublished_steps=1, open_step=open_step, queued=1, leased=1) == size - (2 + 1 + 1)


def test_an_engine_that_is_behind_is_let_start_what_is_fresh_at_its_turn_and_nothing_else() -> None:
    """Against the gate itself: the turn is after all groups that exist, and versions go on as they do."""
    dice = random.Random(7)
    held_back = 0
    for _ in range(3_000):
        per_publish, published = dice.choice([1, 1, 2, 3]), dice.randint(0, 9)
        ahead = dice.randint(1, 4)
        policy = RunPolicy(
            batch_groups=dice.randint(1, 4),
            max_queued_groups=99,
            max_lookahead=ahead,
            max_staleness=dice.randint(1, ahead + 2),
            batches_per_publish=per_publish,
        )
        open_step = OpenStep(dice.randint(1, 6), 1) if dice.random() < 0.5 else NO_OPEN_STEP
        unpublished, queued, leased = dice.randint(0, per_publish), dice.randint(0, 12), dice.randint(0, 6)
        loaded = dice.randint(max(0, published - policy.max_staleness), published)

        exists: dict[str, Any] = {
            "unpublished_steps": unpublished,
            "open_step": open_step,
            "queued": queued,
            "leased": leased,
        }
        room = partial(capacity, policy, **exists)
        may, may_if_current = ((room(behind=behind) or 0) > 0 for behind in (published - loaded, 0))
        steps = (open_step.groups + queued + leased) // max(policy.batch_groups, open_step.target)
        turn = next_train_version(published, unpublished + steps, per_publish)
        fresh = not too_stale(policy, train_version=turn, head_version=loaded)
        assert may == (may_if_current and (fresh or loaded == published))
        if may_if_current:
            held_back += not may
            assert may == (loaded >= required_version(policy, published=published, **exists))
    assert held_back > 200


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ({"max_staleness": 2}, 1),
        ({"max_staleness": 3}, 2),
        ({"max_staleness": 4}, 3),
        ({"max_staleness": 1}, 0),
        ({}, 3),
        ({"max_staleness": 2, "staleness_measure": StalenessMeasure.TAIL}, 3),
        ({"max_staleness": 2, "staleness_measure": StalenessMeasure.MEAN}, 3),
        ({"max_staleness": 2, "order": Order.LIFO}, 3),
        ({"max_staleness": 2, "order": Order.STALEST_FIRST}, 1),
    ],
    ids=str,
)
def test_an_engine_two_versions_behind_looks_as_far_ahead_as_its_heads_stay_fresh(
    policy: dict[str, object], steps: int
) -> None:
    rules = RunPolicy(batch_groups=4, max_lookahead=2, **policy)  # type: ignore[arg-type]
    assert capacity(rules, unpublished_steps=0, open_step=NO_OPEN_STEP, queued=0, leased=0, behind=2) == 4 * steps


@pytest.mark.parametrize(("head", "stale"), [(5, False), (4, False), (3, True)])
def test_too_stale_is_what_exceeds_the_bound(head: int, stale: bool) -> None:
    assert too_stale(RunPolicy(max_staleness=2), train_version=6, head_version=head) is stale


def test_without_a_bound_nothing_is_too_stale() -> None:
    assert not too_stale(RunPolicy(), train_version=1_000_000, head_version=0)
    assert oldest_useful_version(RunPolicy(), 1_000_000) == 0


def test_the_oldest_useful_version_is_never_negative() -> None:
    assert oldest_useful_version(RunPolicy(max_staleness=4), 3) == 0
    assert oldest_useful_version(RunPolicy(max_staleness=4), 9) == 5


@pytest.mark.parametrize(("measure", "age"), [("head", 3_000), ("mean", 4_250), ("tail", 5_000)])
def test_the_age_of_a_group_by_each_measure(measure: str, age: int) -> None:
    assert age_milli(StalenessMeasure(measure), head=3, tail=5, mean_milli=4_250) == age


@pytest.mark.parametrize(("age", "out"), [(4_000, False), (3_999, True)])
def test_a_group_ages_out_by_a_thousandth_of_a_version(age: int, out: bool) -> None:
    assert aged_out(RunPolicy(max_staleness=2), train_version=6, age_milli=age) is out
    assert not aged_out(RunPolicy(), train_version=6, age_milli=age)


@pytest.mark.parametrize("field", ["groups", "tokens", "bytes"])
def test_caps_bound_groups_tokens_and_bytes_each_up_to_the_last_one(field: str) -> None:
    mib = 1 << 20
    caps = RunPolicy(batch_groups=1, max_queued_groups=mib, max_queued_tokens=mib, max_queued_bytes=mib)
    assert within_caps(caps, Amount(**{field: mib}))
    assert not within_caps(caps, Amount(**{field: mib + 1}))


def test_the_next_train_version_rises_with_every_batches_per_publish_unpublished_steps() -> None:
    assert [next_train_version(3, steps, 2) for steps in range(5)] == [3, 3, 4, 4, 5]
