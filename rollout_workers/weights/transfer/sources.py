"""Sources of one file, which choose where its next piece is asked for: mirrors, the publisher and peers in turn.

Order: mirrors by their measured rates (rates.py), the publisher, mirrors that failed of late, peers; peers first where
they are preferred. Invariants: after a failure another source comes first, if there is one; a mirror or peer whose
bytes were in a file that turned out wrong is not asked again for this file.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import quote

from buffer_wire.weights.door import path_of
from rollout_workers.weights.transfer.rates import Rates


class Sources:
    """Sources of one file, known by its name at the publisher and at peers, and by its SHA-256 at mirrors.

    `publisher` is None where only the others can be asked.
    """

    def __init__(
        self,
        name: str,
        sha256: bytes,
        publisher: str | None,
        peers: Callable[[], Awaitable[Sequence[str]]],
        *,
        rates: Rates,
        mirrors: Sequence[str] = (),
        prefer_peers: bool = False,
    ) -> None:
        self._publisher = file_url(publisher, name) if publisher is not None else None
        self._name = name
        self._path = path_of(sha256)
        self._peers = peers
        self._prefer_peers = prefer_peers
        self._rates = rates
        self._mirrors = mirrors
        self._tried: set[str] = set()
        self._banned: set[str] = set()

    async def choose(self) -> str | None:
        """A URL that has not failed in this pass; None when all have, and a new pass begins."""
        async for url in self._in_order():
            if url not in self._tried | self._banned:
                return url
        self._tried.clear()
        return None

    async def _in_order(self) -> AsyncIterator[str]:
        if self._prefer_peers:
            for base in await self._peers():
                yield file_url(base, self._name)
        good, failed = self._rates.order(self._mirrors)
        for base in good:
            yield file_url(base, self._path)
        if self._publisher is not None:
            yield self._publisher
        for base in failed:
            yield file_url(base, self._path)
        if not self._prefer_peers:
            for base in await self._peers():
                yield file_url(base, self._name)

    def failed(self, url: str) -> None:
        """Note that a URL failed: others are asked first."""
        self._tried.add(url)

    def is_publisher(self, url: str) -> bool:
        """True for the source whose content cannot be had elsewhere."""
        return url == self._publisher

    def is_mirror(self, url: str) -> bool:
        """True for a source that knows the file by its SHA-256."""
        return url.endswith(self._path)

    def ban(self, url: str) -> None:
        """Ban a URL: it is never asked for this file again."""
        self._banned.add(url)

    @property
    def described(self) -> str:
        """Name of the source for error messages."""
        return self._publisher or f"any mirror or peer ({self._name})"


def file_url(base_url: str, name: str) -> str:
    """URL of a file of the manifest."""
    return f"{base_url.rstrip('/')}/{quote(name)}"
