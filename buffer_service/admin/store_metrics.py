"""The store's own state as Prometheus metrics, asked of it once per scrape."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from buffer_service.domain.ops import StoreFacts


class StoreCollector(Collector):
    """Metrics of what the store said before; None: it did not answer in time. Collecting does no I/O."""

    def __init__(self, facts: StoreFacts | None) -> None:
        self._facts = facts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All families."""
        up = GaugeMetricFamily(
            "rollout_buffer_store_up",
            "1 where the store has answered all that this scrape asks; 0: metrics of runs and of the store are absent.",
        )
        used = GaugeMetricFamily("rollout_buffer_store_memory_used_bytes", "Memory that the store uses.")
        limit = GaugeMetricFamily(
            "rollout_buffer_store_memory_limit_bytes", "The store's maxmemory; absent where there is none."
        )
        clients = GaugeMetricFamily("rollout_buffer_store_clients", "Connections to the store, of anybody.")
        facts = self._facts
        up.add_metric([], facts is not None)
        if facts is not None:
            used.add_metric([], facts.memory_used_bytes)
            if facts.memory_limit_bytes:
                limit.add_metric([], facts.memory_limit_bytes)
            clients.add_metric([], facts.clients)
        yield from (up, used, limit, clients)
