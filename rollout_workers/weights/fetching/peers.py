"""Other workers of the run as sources of weights: who has which version, and where.

A peer need not be trusted: every file is checked against the manifest's checksum, wherever it comes from.
"""

import random
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from buffer_wire.errors import RolloutBufferError
from buffer_wire.limits import is_http_url
from rollout_workers.service.client import ServiceClient
from rollout_workers.versions import Version

_ANSWER_S = 5.0
_KNOWN_S = 2.0
_ALIVE_MS = 60_000
_log = structlog.get_logger()


class Peers(Protocol):
    """Peers of a worker: sources of a version besides the publisher."""

    async def with_version(self, version: Version) -> Sequence[str]:
        """Base URLs to which a file's name is appended, the best first; empty when there is none. Raises nothing."""
        ...


class NoPeers:
    """Peers of a worker that has none."""

    async def with_version(self, version: Version) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """No URLs, for there are no peers."""
        return ()


class ReportedPeers:
    """Workers whose engines are reported to hold a version, in random order, so that no one of them serves all."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self.own_url = ""
        """URL of this worker itself, which is no peer."""
        self._known: dict[Version, list[str]] = {}
        self._asked_at = float("-inf")

    async def with_version(self, version: Version) -> Sequence[str]:
        """See Peers. The service is asked at most every two seconds."""
        if time.monotonic() - self._asked_at > _KNOWN_S:
            await self._ask()
        urls = self._known.get(version, [])
        return [f"{url}/{version.label}" for url in random.sample(urls, len(urls))]

    async def _ask(self) -> None:
        self._asked_at = time.monotonic()
        try:
            engines = await self._service.engines(timeout_s=_ANSWER_S)
        except RolloutBufferError as error:
            _log.warning("peers are not known", error=str(error))
            return
        known: dict[Version, set[str]] = {}
        for engine in engines:
            url = engine.weights_url.rstrip("/")
            if is_http_url(url) and url != self.own_url and engine.silent_ms < _ALIVE_MS:
                known.setdefault(Version.of(engine.loaded), set()).add(url)
        self._known = {version: sorted(urls) for version, urls in known.items()}
