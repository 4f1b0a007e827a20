"""Sources of one file, which choose where its next piece is asked for: the publisher and the peers in turn.

Invariants: after a failure another source comes first, if there is one; a peer whose bytes were in a file that turned
out wrong is not asked again for this file.
"""

from collections.abc import Awaitable, Callable, Sequence

from rollout_workers.weights.fetching.files import file_url


class Sources:
    """Sources of one file. `publisher` is None where only peers can be asked."""

    def __init__(
        self,
        name: str,
        publisher: str | None,
        peers: Callable[[], Awaitable[Sequence[str]]],
        *,
        prefer_peers: bool = False,
    ) -> None:
        self._publisher = file_url(publisher, name) if publisher is not None else None
        self._name = name
        self._peers = peers
        self._prefer_peers = prefer_peers
        self._tried: set[str] = set()
        self._banned: set[str] = set()

    async def choose(self) -> str | None:
        """A URL that has not failed in this pass; None when all have, and a new pass begins."""
        if not self._tried and not self._prefer_peers and self._publisher is not None:
            return self._publisher
        peers = [file_url(base, self._name) for base in await self._peers()]
        own = [self._publisher] if self._publisher is not None else []
        for url in [*peers, *own] if self._prefer_peers else [*own, *peers]:
            if url not in self._tried | self._banned:
                return url
        self._tried.clear()
        return None

    def failed(self, url: str) -> None:
        """Note that a URL failed: others are asked first."""
        self._tried.add(url)

    def is_peer(self, url: str) -> bool:
        """True for every source but the publisher."""
        return url != self._publisher

    def ban(self, url: str) -> None:
        """Ban a URL: it is never asked for this file again."""
        self._banned.add(url)

    @property
    def described(self) -> str:
        """Name of the source for error messages."""
        return self._publisher or f"any peer ({self._name})"
