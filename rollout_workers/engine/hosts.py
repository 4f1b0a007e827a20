"""Hosts of engines: a host opens its engine, opens it again after a failure, and closes what it owns.

RemoteHost is that of a server which somebody else runs, of whatever kind that is driven over HTTP.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollout_workers.engine.calls import ServerOptions
from rollout_workers.engine.errors import EngineError, EngineUnavailable, EngineUnfit
from rollout_workers.engine.options import HostOptions
from rollout_workers.engine.types import Engine, PrefixCache

_POLL_S = 0.25
_RESUME_S = 1.0


class EngineHost(Protocol):
    """Owner of one engine."""

    base_model: str | None
    """Model that holds version 0; None when only the engine can say."""

    @property
    def ended(self) -> bool:
        """True when a process that the worker owns has ended."""
        ...

    @property
    def why_ended(self) -> str:
        """Account of the end of such a process, as far as it is known: its exit code, and the end of its log."""
        ...

    async def open(self) -> Engine:
        """Start if need be, and connect. Raises EngineError."""
        ...

    async def revive(self) -> Engine:
        """Make one attempt, after a failure, to have it running and connected again. Raises EngineError."""
        ...

    async def close(self) -> None:
        """Disconnect; end what the worker started."""
        ...


class ServerEngine(Engine, Protocol):
    """Engine that is a server, of which somebody else decides which version it is."""

    async def check_version(self) -> None:
        """Raise EngineUnfit if it says that it is too old; other EngineErrors where it does not answer yet."""
        ...


class RemoteHost:
    """Host of a server that somebody else runs. `connect` makes the engine of a base URL."""

    ended = False
    why_ended = ""

    def __init__(self, url: str, options: HostOptions, connect: Callable[[str], ServerEngine]) -> None:
        self.base_model = options.base_model
        self.url = url
        self._connect = connect
        self._engine = connect(url)
        self._timeout_s = options.engine_timeout_s

    async def is_ready(self) -> bool:
        """True if the server could be opened at once. Raises EngineUnfit."""
        return await self._is_fit() and await self._engine.ready()

    async def open(self) -> Engine:
        """Wait until the server is ready."""
        deadline, checked = time.monotonic() + self._timeout_s, False
        while True:
            if not checked:
                # First: a server that is too old may not know how to tell that it is ready.
                checked = await self._is_fit()
            if await self._engine.ready():
                break
            if time.monotonic() > deadline:
                raise EngineUnavailable(self.url, "starting", f"not ready after {self._timeout_s:g} s")
            # A worker that was killed in the middle of a load leaves a server that is paused: there, but not ready.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_RESUME_S):
                    await self._engine.resume()
            await asyncio.sleep(_POLL_S)
        return self._engine

    async def revive(self) -> Engine:
        """Look whether the server is there; one that was started anew is connected anew."""
        await self._is_fit()
        # A server that was left paused is there, but not ready: it is reached by going on.
        await self._engine.resume()
        if not await self._engine.ready():
            raise EngineUnavailable(self.url, "reconnecting", "not ready")
        if await self._engine.was_restarted():
            # Nothing that is known of the old one holds, its way to stream included; its calls have ended with it.
            old, self._engine = self._engine, self._connect(self.url)
            await old.close()
        return self._engine

    async def _is_fit(self) -> bool:
        """False while the server does not tell its version. Raises EngineUnfit when it is too old."""
        try:
            await self._engine.check_version()
        except EngineUnfit:
            raise
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Disconnect."""
        await self._engine.close()


def server_options(options: HostOptions) -> ServerOptions:
    """Deadlines and settings of the calls to one server of this worker."""
    return ServerOptions(
        generate_timeout_s=options.generate_timeout_s,
        load_timeout_s=options.reload_timeout_s,
        stream=options.stream,
        stream_interval=options.stream_interval,
        prefix_cache=PrefixCache(options.prefix_cache),
        counts_as=options.sglang_version,
        config_path=Path(options.tokenizer) if options.tokenizer else None,
    )
