"""Counters of an rpc process: nothing is lost between the messages of a stream and the file that is shared."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from buffer_service.observability import tally
from buffer_service.observability.metrics import RpcMetrics


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
