"""Follows the SGLang servers that an sglang-router lists. Seen working with sglang-router 0.3.2.

The router is asked who is there, and nothing else: every server is driven directly, because pauses, loads and aborts
have to reach each of them, and a group's samples have to stay on one.

Invariants: a server is dropped only when several listings in a row lack it: a router that starts anew and lists nothing
for a moment costs nothing; while the router does not answer, everything stays as it is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from rollout_workers.engine.errors import EngineError, EngineMalformed, EngineRejected, EngineUnavailable, EngineUnfit
from rollout_workers.engine.hosts import RemoteHost
from rollout_workers.engine.http import HttpConnection
from rollout_workers.options import WorkerOptions
from rollout_workers.service.client import WaitLog

EVERY_S = 2.0
"""Time between two listings."""

MISSING = 3
"""Listings in a row that lack a server, after which it is let go."""

_ASK_S = 5.0
_log = structlog.get_logger()


class RouterClient:
    """The worker list of the router at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = HttpConnection(self.url, reconnect_s=1.0)

    async def servers(self) -> list[str]:
        """Base URLs of the servers that the router sends requests to. Raises EngineError.

        A server that serves only prefill or only decode is no engine by itself and is left out.
        """
        doing = "asking the router for its workers"
        reply = await self._http.call("GET", "/workers", doing=doing, deadline_s=_ASK_S, repeatable=True)
        if reply.status != 200:
            raise EngineRejected(self.url, doing, reply.status, reply.message)
        try:
            workers = reply.body["workers"]
            urls = [str(worker["url"]) for worker in workers if worker.get("worker_type", "regular") == "regular"]
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineMalformed(self.url, doing, f"{type(error).__name__} {error}") from error
        # With --dp-aware the router lists a server once for each of its ranks, as URL@rank.
        return sorted({url.rpartition("@")[0] if "@" in url else url for url in urls if url.startswith("http")})

    async def close(self) -> None:
        """Disconnect."""
        await self._http.close()


class RouterWatch:
    """Calls `add` for every server that comes, and `remove` for every one that is gone; one call at a time for each.

    `at_work`: the URLs that are driven now.
    """

    def __init__(
        self,
        router: RouterClient,
        at_work: Callable[[], set[str]],
        *,
        add: Callable[[str], Awaitable[None]],
        remove: Callable[[str], Awaitable[None]],
        every_s: float | None = None,
    ) -> None:
        self._router = router
        self._at_work = at_work
        self._add = add
        self._remove = remove
        self._every_s = EVERY_S if every_s is None else every_s
        self._missing: dict[str, int] = {}
        self._changing: set[str] = set()
        self._errors: dict[str, str] = {}
        """Last logged errors of servers that could not be added, by URL."""

    async def run(self) -> None:
        """Follow until cancelled."""
        log = WaitLog("follow the router's workers")
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    listed = set(await self._router.servers())
                except EngineError as error:
                    log.say(f"the router at {self._router.url}", str(error))
                else:
                    for url, change in self._changes(listed):
                        self._changing.add(url)
                        group.create_task(self._carry_out(url, change))
                await asyncio.sleep(self._every_s)

    def _changes(self, listed: set[str]) -> list[tuple[str, Callable[[str], Awaitable[None]]]]:
        at_work = self._at_work()
        self._missing = {url: self._missing.get(url, 0) + 1 for url in at_work - listed}
        gone = {url for url, times in self._missing.items() if times >= MISSING}
        return [
            *((url, self._add) for url in sorted(listed - at_work - self._changing)),
            *((url, self._remove) for url in sorted(gone - self._changing)),
        ]

    async def _carry_out(self, url: str, change: Callable[[str], Awaitable[None]]) -> None:
        try:
            await change(url)
        except EngineError as error:
            # Listed, and not ready yet or not to be driven: the next listing tries again.
            if self._errors.get(url) != str(error):
                self._errors[url] = str(error)
                _log.warning("engine not added", address=url, error=str(error))
        else:
            self._errors.pop(url, None)
        finally:
            self._changing.discard(url)


async def first_ready(router: RouterClient, options: WorkerOptions) -> RemoteHost:
    """The first listed server that is ready; the others join later. Raises EngineUnavailable when none is in time, and
    EngineUnfit when none of those that are listed can be driven.
    """
    log, deadline = WaitLog("find engines"), time.monotonic() + options.engine_timeout_s
    while True:
        why = "it lists no server"
        try:
            urls, unfit = await router.servers(), list[EngineUnfit]()
            for url in urls:
                host = options.kind.hosts.host_at(url, options)
                try:
                    if await host.is_ready():
                        return host
                    why = f"{url} is not ready"
                except EngineUnfit as error:
                    unfit.append(error)
                await host.close()
            if unfit and len(unfit) == len(urls):
                raise unfit[0]
        except EngineUnfit:
            raise
        except EngineError as error:
            why = str(error)
        if time.monotonic() > deadline:
            doing = f"waiting {options.engine_timeout_s:g} s for a server that is ready"
            raise EngineUnavailable(router.url, doing, why)
        log.say(f"the router at {router.url}", why)
        await asyncio.sleep(min(EVERY_S, options.engine_timeout_s / 10))
