"""Totals, generation times and the window in the reference model."""

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.window import length_buckets
from buffer_service.rules.totals import LENGTH_BUCKETS, MOST, TOTALS
from buffer_wire.limits import MAX_VERSION
from tests.oracle.behaviour.world import World


def report(world: World, tokens: int, busy_ms: int, request_ms: int) -> ops.EngineReported:
    loaded = WeightVersion(1, 0)
    said = ops.EngineReport(
        "engine",
        "worker",
        "ready",
        loaded,
        0,
        0,
        "",
        0,
        decoded_tokens=tokens,
        decode_busy_ms=busy_ms,
        decode_request_ms=request_ms,
    )
    return world.do(world.model.report_engine, said)


def totals(world: World, *names: str) -> list[int]:
    return [world.statistic(name) for name in names]


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1_024, 10), (1_025, 11), (1 << 22, 22)],
    ids=str,
)
def test_a_bucket_holds_lengths_up_to_its_power_of_two(tokens: int, bucket: int) -> None:
    assert dict(length_buckets(tokens.to_bytes(4, "little"))) == {bucket: 1}


def test_no_length_is_beyond_the_last_bucket() -> None:
    assert dict(length_buckets(b"\xff\xff\xff\xff")) == {LENGTH_BUCKETS - 1: 1}


def test_a_view_has_every_total_from_the_beginning() -> None:
    view = World(batch_groups=2).view
    assert {name: view.statistics[name] for name in TOTALS} == dict.fromkeys(TOTALS, 0)
    assert list(view.response_lengths) == [0] * LENGTH_BUCKETS
    assert (view.window, dict(view.environment_statistics)) == (None, {})


def test_what_is_requeued_and_assembled_again_counts_twice_as_assembled() -> None:
    world = World(batch_groups=1)
    world.push("a", response_tokens=(4, 8), turns=3, truncated=1)
    world.batch(0)
    world.resume(0, ops.ResumeMode.REQUEUE)
    world.batch(0)
    assert totals(world, "accepted_response_tokens", "assembled_response_tokens", "assembled_longest_tokens") == [
        12,
        24,
        16,
    ]
    assert totals(world, "assembled_turns", "assembled_truncated_samples") == [6, 2]


def test_generation_is_measured_by_the_last_lease() -> None:
    world = World(batch_groups=2)
    world.submit("a")
    first = world.lease_one()
    world.now += 5_000
    world.interrupt(first.lease_id)
    second = world.lease_one()
    world.now += 700
    world.push(second)
    assert totals(world, "generated_groups", "generation_ms") == [1, 700]


def test_engine_counters_leave_the_revision_alone() -> None:
    world = World(batch_groups=2)
    revision = report(world, 0, 0, 0).revision
    assert report(world, 10, 5, 5).revision == revision
    assert report(world, 30, 9, 12).revision == revision
    assert report(world, 1, 1, 1).revision == revision
    assert totals(world, "decoded_tokens", "decode_busy_ms", "decode_request_ms") == [31, 10, 13]


def test_a_total_stops_where_the_store_can_count_no_further() -> None:
    world = World(batch_groups=1)
    world.publish(MAX_VERSION)
    world.push("a", response_tokens=(1 << 20, 1 << 20))
    world.batch(0)
    assert totals(world, "token_staleness_milli_sum") == [MOST]


def test_the_window_begins_anew_with_a_term() -> None:
    world = World(batch_groups=2)
    world.publish(1, clock=(100, 10))
    world.now += 3_000
    world.publish(2, clock=(160, 12))
    window = world.view.window
    assert window is not None
    assert (window.seconds, window.publishes, window.grown("trainer_busy_ms")) == (3.0, 1, 60)
    world.resume()
    world.publish(3, clock=(50, 1))
    assert world.view.window is None
    assert totals(world, "trainer_busy_ms", "trainer_wait_ms") == [210, 13]
