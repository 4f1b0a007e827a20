"""The store's own state as Prometheus metrics, asked of it once per scrape."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from buffer_service.admin.reading import UNREAD
from buffer_service.domain.ops import StoreFacts


class StoreCollector(Collector):
    """Metrics of what the store said before; None: it did not answer in time. `unread` as in reading.Runs.

    Collecting does no I/O.
    """

    def __init__(self, facts: StoreFacts | None, unread: Mapping[str, str]) -> None:
        self._facts = facts
        self._unread = Counter(unread.values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric families of the store."""
        up = GaugeMetricFamily(
            "rollout_buffer_store_up",
            "1 where the store has answered this scrape; 0: metrics of runs and of the store are absent.",
        )
        used = GaugeMetricFamily("rollout_buffer_store_memory_used_bytes", "Memory that the store uses.")
        limit = GaugeMetricFamily(
            "rollout_buffer_store_memory_limit_bytes", "The store's maxmemory; absent where there is none."
        )
        clients = GaugeMetricFamily("rollout_buffer_store_clients", "Connections to the store, of anybody.")
        shard = {
            "up": GaugeMetricFamily(
                "rollout_buffer_payload_shard_up",
                "1 where a primary of the payload cluster answers; 0: what needs it waits.",
                labels=["server"],
            ),
            "used": GaugeMetricFamily(
                "rollout_buffer_payload_shard_memory_used_bytes",
                "Memory that a primary of the payload cluster uses.",
                labels=["server"],
            ),
            "limit": GaugeMetricFamily(
                "rollout_buffer_payload_shard_memory_limit_bytes",
                "The maxmemory of a primary of the payload cluster; absent where there is none.",
                labels=["server"],
            ),
        }
        unread = GaugeMetricFamily(
            "rollout_buffer_runs_unread",
            "Runs of which this scrape has nothing, although the store answers; the log names them.",
            labels=["reason"],
        )
        facts = self._facts
        up.add_metric([], facts is not None)
        if facts is not None:
            used.add_metric([], facts.memory_used_bytes)
            if facts.memory_limit_bytes:
                limit.add_metric([], facts.memory_limit_bytes)
            clients.add_metric([], facts.clients)
            for each in facts.payload_shards:
                shard["up"].add_metric([each.server], each.memory_used_bytes is not None)
                if each.memory_used_bytes is not None:
                    shard["used"].add_metric([each.server], each.memory_used_bytes)
                if each.memory_limit_bytes:
                    shard["limit"].add_metric([each.server], each.memory_limit_bytes)
            for reason in UNREAD:
                unread.add_metric([reason], self._unread[reason])
        yield from (up, used, limit, clients, *shard.values(), unread)
