"""Metrics of the doors, from the process that serves the admin page; the rpc processes read the same files."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from buffer_service.security.doors import Doors


class DoorCollector(Collector):
    """Metrics of the files of tokens and certificates: which are broken, and the number of tokens."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the metric families; without values where the service has no such files."""
        broken = GaugeMetricFamily(
            "rollout_buffer_security_file_broken",
            "1 while a file of tokens or certificates cannot be used and an earlier one stays in force.",
            labels=["file"],
        )
        tokens = GaugeMetricFamily("rollout_buffer_tokens", "Entries of the tokens file.")
        if (file := self._doors.gate.file) is not None:
            known = file.look()
            broken.add_metric(["tokens"], float(file.broken))
            tokens.add_metric([], len(known.entries))
        files = [one for one in (self._doors.certificates, self._doors.admin_certificates) if one is not None]
        if files:
            for certificates in files:
                certificates.material()
            broken.add_metric(["certificates"], float(any(one.broken for one in files)))
        yield from (broken, tokens)
