"""Tests of which levers are advised, with the closed form's numbers."""

import re
from dataclasses import replace
from typing import Any

import pytest

from buffer_service.domain.ops import Amount
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.observability.estimate import closed_forms as cf
from buffer_service.observability.estimate import estimate
from buffer_wire.estimate import Advice
from tests.support.views import make_loop

BLOCKS: dict[str, Any] = {"overflow_action": OverflowAction.BLOCK}


def levers(policy: RunPolicy | None = None, **fields: Any) -> dict[str, Advice]:
    return {one.lever: one for one in estimate(make_loop(policy, **fields)).advice}


def test_a_long_queue_is_shortened_where_training_is_the_bottleneck() -> None:
    long = RunPolicy(batch_groups=16, max_queued_groups=64)
    found = levers(long, rho=1.6)["queue"]
    assert "max_queued_groups 64 -> 16: in-queue staleness 2.7 -> 0.8" in found.text
    assert found.change == pytest.approx(cf.in_queue(1, 1.6) - cf.in_queue(4, 1.6), abs=0.01)
    assert "queue" not in levers(long, rho=0.7), "rollout-bound the queue is not full"
    assert "queue" not in levers(rho=1.6), "it holds one batch already"


def test_a_shorter_queue_says_what_it_costs_in_throughput() -> None:
    few = RunPolicy(batch_groups=4, max_queued_groups=16)
    found = levers(few, rho=1.25)["queue"]
    loss = cf.small_batch_period(4, 1, 1.25) - 1
    assert found.throughput == pytest.approx(-loss, abs=0.01)
    assert f"{loss:.1%} less is trained" in found.text


def test_near_balance_a_long_queue_may_fill() -> None:
    assert "up to 3.0 -> 1.0" in levers(RunPolicy(batch_groups=16, max_queued_groups=48), rho=0.95)["queue"].text


def test_a_cap_in_tokens_is_called_by_its_name() -> None:
    policy = RunPolicy(batch_groups=16, max_queued_groups=160, max_queued_tokens=640_000)
    groups = {"trained": Amount(groups=10, samples=80, tokens=100_000, bytes=1)}
    assert (
        "max_queued_tokens 640000 -> 160000, room for 64 groups -> for 16"
        in levers(policy, rho=1.6, groups=groups)["queue"].text
    )


def test_streaming_takes_away_what_waits_for_whole_batches() -> None:
    found = levers()["streaming"]
    assert "micro_batch_groups 2, max_queued_groups 4" in found.text
    assert "in-queue staleness 0.7 -> 0.1" in found.text
    assert "streaming" not in levers(RunPolicy(batch_groups=16, micro_batch_groups=2, max_queued_groups=4))
    assert "micro_batch_groups 1, max_queued_groups 4" in levers(world_size=2)["streaming"].text
    assert "streaming" not in levers(RunPolicy(batch_groups=1)), "nothing is smaller than a group"


def test_twice_the_batch_halves_what_passes_during_generation() -> None:
    found = levers(concurrency=256)["batch"]
    assert "16 -> 32 groups" in found.text
    assert found.change == pytest.approx(-1.5, abs=0.01)
    assert found.throughput == 0


def test_less_concurrency_is_advised_only_where_it_is_much_and_never_without_its_price() -> None:
    found = levers(concurrency=512)["concurrency"]
    assert "512 -> 256 requests at once" in found.text
    assert "up to 50% less is trained" in found.text
    assert found.throughput is None
    assert "concurrency" not in levers(concurrency=64)
    assert "as much is trained" in levers(concurrency=512, rho=2.5)["concurrency"].text


def test_the_tail_is_cut_only_where_there_is_one() -> None:
    found = levers(tailness=3.0)["length_cap"]
    assert "M 3.00 -> 2.00" in found.text
    assert "trained truncated" in found.text
    assert found.change == pytest.approx(-1.0, abs=0.01)
    assert "length_cap" not in levers(tailness=1.4)


def test_gpus_move_towards_balance_and_staleness_that_rises_is_said() -> None:
    found = levers(rho=0.5)["split"]
    assert "engines for 80% more tokens/s" in found.text
    assert found.throughput == pytest.approx(0.8, abs=0.01)
    assert found.change > 0
    assert "staleness 2.0 -> 3.6" in found.text
    train = levers(rho=1.6)["split"]
    assert "38% of them could train instead" in train.text
    assert train.throughput is None, "what is freed is not what is trained"
    names = list(levers(rho=1.6, concurrency=256))
    assert names.index("split") < names.index("gate"), "it costs nothing, and a gate does"
    assert "split" not in levers(rho=1.0)


def test_a_gate_is_advised_against_much_staleness_and_loosened_where_it_holds_back() -> None:
    found = levers(concurrency=256)["gate"]
    assert "max_lookahead 2, overflow_action block: staleness 3.7 -> 2.0; at least 19% less is trained" in found.text
    assert (found.throughput or 0) < 0
    assert "gate" not in levers(concurrency=64)
    held = RunPolicy(batch_groups=16, max_lookahead=0, max_staleness=0, overflow_action=OverflowAction.BLOCK)
    loose = levers(held)["gate"]
    assert "max_lookahead 0 -> 1, max_staleness 0 -> 1:" in loose.text
    assert loose.staleness == 1
    assert (loose.throughput or 0) > 0.05


def test_a_gate_other_than_the_lookahead_is_raised_by_one() -> None:
    held = RunPolicy(batch_groups=16, max_lookahead=1, max_staleness=2, max_queued_groups=32, **BLOCKS)
    assert "max_lookahead 1 -> 2, max_staleness 2 -> 3:" in levers(held, concurrency=256)["gate"].text


@pytest.mark.parametrize("fields", [{"max_inflight_groups": 24}, {"reserve_queue_space": True}])
def test_no_engines_are_advised_where_the_policy_holds_the_requests(fields: dict[str, Any]) -> None:
    """16 groups of 8 decode at once, and 24 are in flight, as their longest response takes 1.5 times the mean."""
    assert "split" not in levers(RunPolicy(batch_groups=16, **fields), rho=0.5)
    assert "split" in levers(RunPolicy(batch_groups=16, max_inflight_groups=64), rho=0.5)
    assert "split" in levers(RunPolicy(batch_groups=16, **fields), rho=1.6)


NUMBER = re.compile(r"\b((?:max|micro|batch)_[a-z_]+) (?:\d+ -> )?(\d+)")


@pytest.mark.parametrize(
    ("policy", "lever", "fields", "advised"),
    [
        (RunPolicy(batch_groups=16, prefetch_batches=4), "gate", {"rho": 1.5}, {"max_lookahead": 4}),
        (
            RunPolicy(batch_groups=16, batch_tokens=90_000, max_queued_groups=64),
            "queue",
            {"rho": 1.6},
            {"max_queued_groups": 16},
        ),
        (
            RunPolicy(batch_groups=16, batch_tokens=90_000, max_queued_groups=160, max_queued_tokens=640_000),
            "queue",
            {"rho": 1.6},
            {"max_queued_tokens": 180_000},
        ),
        (
            RunPolicy(batch_groups=16, batch_tokens=90_000),
            "batch",
            {"concurrency": 256},
            {"batch_tokens": 180_000, "batch_groups": 32},
        ),
        (RunPolicy(batch_groups=16), "streaming", {}, {"micro_batch_groups": 2, "max_queued_groups": 4}),
        (RunPolicy(batch_groups=16, max_lookahead=0, max_staleness=0), "gate", {}, {"max_lookahead": 1}),
    ],
)
def test_the_service_takes_what_is_advised(
    policy: RunPolicy, lever: str, fields: dict[str, Any], advised: dict[str, int]
) -> None:
    # Where a budget of tokens decides, 11 groups of 8,000 fit a batch.
    grown = {"assembled_groups": 20 * 11} if policy.batch_tokens else {}
    groups = {"trained": Amount(groups=10, samples=80, tokens=80_000, bytes=1)}
    found = levers(policy, grown=grown, groups=groups, **fields)[lever]
    numbers = {name: int(number) for name, number in NUMBER.findall(found.text)}
    assert numbers.items() >= advised.items()
    if lever == "batch":
        numbers["max_queued_groups"] = 2 * policy.max_queued_groups
    replace(policy, **numbers)  # type: ignore[arg-type]


def test_what_costs_no_throughput_comes_first_and_the_strongest_of_it() -> None:
    advice = estimate(make_loop(concurrency=512, rho=0.7)).advice
    free = [one for one in advice if one.throughput is not None and one.throughput >= -0.02]
    assert list(advice[: len(free)]) == sorted(free, key=lambda one: one.change)
    assert len(free) < len(advice)


def test_what_is_hardly_worth_it_is_not_advised() -> None:
    calm = levers(
        RunPolicy(batch_groups=64, micro_batch_groups=2, max_queued_groups=4), concurrency=64, rho=0.85, tailness=1.1
    )
    assert calm == {}
