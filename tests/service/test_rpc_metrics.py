"""Counters of an rpc process: nothing is lost between the messages of a stream and the file that is shared."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Histogram

from buffer_service.observability import tally
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.observability.store_metrics import STORE_ERRORS, StoreMetrics
from buffer_wire.errors import StoreFault


def sent(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("rollout_buffer_rpc_sent_bytes_total", {"method": "PullBatch"})


async def test_counts_of_a_stream_are_seen_when_it_ends() -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry)
    metrics.sent("PullBatch", 10)
    metrics.sent("PullBatch", 5)
    assert sent(registry) == 0
    metrics.ended("PullBatch", "OK", 0.1)
    assert sent(registry) == 15


async def test_counts_of_a_stream_are_seen_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "FLUSH_S", 0.01)
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry)
    for total in (10, 20):
        metrics.sent("PullBatch", 10)
        # A timer of the same loop, set before this one and shorter.
        await asyncio.sleep(0.05)
        assert sent(registry) == total


async def test_observations_that_are_written_together_are_those_that_were_made() -> None:
    amounts = [0.0, 0.1, 0.1000001, 0.25, 3.0]
    one_by_one, together = CollectorRegistry(), CollectorRegistry()
    direct = Histogram("seconds", "Seconds.", buckets=(0.1, 0.25), registry=one_by_one)
    summed = tally.SummedHistogram("seconds", "Seconds.", buckets=(0.1, 0.25), registry=together)
    pending, kept = tally.Tally(), tally.Observations(summed)
    for amount in amounts:
        direct.observe(amount)
        pending.observe(kept, amount)
    assert together.get_sample_value("seconds_count") == 0
    pending.flush()
    for name, labels in [("seconds_bucket", {"le": le}) for le in ("0.1", "0.25", "+Inf")] + [("seconds_sum", {})]:
        assert together.get_sample_value(name, labels) == one_by_one.get_sample_value(name, labels)
    pending.flush()
    assert together.get_sample_value("seconds_count") == len(amounts)


async def test_calls_of_the_store_are_counted_by_operation_and_their_failures_by_reason() -> None:
    registry = CollectorRegistry()
    calls = StoreMetrics(registry)
    for operation, seconds in (("push", 0.002), ("push", 0.2), ("pull", 0.001)):
        calls.took(operation, seconds)
    calls.flush()

    def count(operation: str) -> float | None:
        return registry.get_sample_value("rollout_buffer_store_call_seconds_count", {"operation": operation})

    def failures(kind: str) -> float | None:
        return registry.get_sample_value("rollout_buffer_store_errors_total", {"kind": kind})

    assert (count("push"), count("pull"), count("lease")) == (2, 1, None)
    assert [failures(kind) for kind in STORE_ERRORS] == [0] * len(STORE_ERRORS)
    calls.failed("store_unavailable")
    calls.failed("a reason that is not the store's")
    assert (failures("store_unavailable"), failures(StoreFault.reason)) == (1, 1)


async def test_waits_for_room_and_for_batches_are_observed_however_they_end() -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry)
    with metrics.blocked():
        assert registry.get_sample_value("rollout_buffer_blocked_pushes") == 1
    with pytest.raises(TimeoutError), metrics.pulling("r"):
        raise TimeoutError
    for name in ("push", "pull"):
        assert registry.get_sample_value(f"rollout_buffer_{name}_wait_seconds_count") == 1


async def test_a_pull_counts_for_its_run_while_it_waits_and_never_before() -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry)

    def waiting() -> float | None:
        return registry.get_sample_value("rollout_buffer_waiting_pulls", {"run": "r"})

    with metrics.pulling("r"):
        assert waiting() is None, "nobody has found such a run yet"
    assert waiting() is None
    with metrics.pulling("r") as wait:
        wait()
        wait()
        assert waiting() == 1
        with metrics.pulling("r") as other:
            other()
            assert waiting() == 2
        assert waiting() == 1
    assert waiting() == 0
