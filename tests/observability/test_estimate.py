"""Whatever a run counted, it has an estimate: nothing in it is infinite, and what is missing has a reason."""

from dataclasses import fields
from math import isfinite
from random import Random
from typing import Any

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.domain.presets import fields_of
from buffer_service.observability.estimate import estimate
from buffer_service.rules.totals import TOTALS
from buffer_wire.estimate import Estimate
from buffer_wire.messages import message_of, value_of
from rollout_buffer.v1 import runs_pb2
from tests.support.views import make_engines, make_view, make_window

POLICIES: list[dict[str, Any]] = [
    {},
    {"max_queued_groups": 64, "prefetch_batches": 3},
    {"batches_per_publish": 4, "order": "lifo"},
    {"overflow_action": OverflowAction.BLOCK},
    {"overflow_action": OverflowAction.REJECT},
    {"batch_tokens": 1_000, "max_queued_tokens": 100_000},
    {"filter_equal_rewards": True},
    {"micro_batch_groups": 8, "overflow_action": OverflowAction.BLOCK},
    *(fields_of(name, 8) for name in ("sync", "areal(2)", "miles", "prime_rl", "queue_max(1)", "streaming(2)")),
]


def numbers(value: Any) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, tuple):
        return [number for one in value for number in numbers(one)]
    if hasattr(type(value), "__dataclass_fields__"):
        return [number for field in fields(value) for number in numbers(getattr(value, field.name))]
    return []


def made_up(rng: Random) -> RunView:
    """A view of anything that may be counted, likely or not."""
    grown = {name: rng.choice((0, *(rng.randint(1, 10**digits) for digits in range(1, 10)))) for name in TOTALS}
    for stage in ("accepted", "assembled"):
        grown[f"{stage}_truncated_samples"] = min(grown[f"{stage}_truncated_samples"], grown[f"{stage}_samples"])
    return make_view(
        RunPolicy(**{"batch_groups": 8, **rng.choice(POLICIES)}),
        window=make_window(publishes=rng.randint(1, 32), seconds=rng.randint(0, 999), grown=grown),
        engines=make_engines(rng.randint(0, 3)),
        world_size=rng.randint(0, 5),
        statistics={"recent_acceptance_ppm": rng.choice((0, 1, 500_000, 1_000_000))},
        response_lengths=rng.choice(((), (0,) * 23, (1, 2, 3))),
    )


def test_whatever_was_counted_there_is_an_estimate() -> None:
    rng, predicted = Random(0), 0
    for _ in range(300):
        found = estimate(made_up(rng))
        assert all(isfinite(number) for number in numbers(found))
        missing = {field.name for field in fields(found.quantities) if getattr(found.quantities, field.name) is None}
        assert missing == {one.name for one in found.unknown} - {"predicted"}
        assert (found.predicted.staleness is None) == ("predicted" in {one.name for one in found.unknown})
        assert value_of(Estimate, message_of(runs_pb2.RunEstimate, found)) == found
        predicted += found.predicted.staleness is not None
    assert predicted > 20
