"""Runs as they change, for the pages that watch them.

One task reads a run once a PERIOD_S while anybody watches it, however many do. Each watcher gets the newest state when
it is ready for it, so that a slow one holds nobody up and skips states. A state is sent when something of it changed:
ledgers, totals, policy, engines. Time alone is no change: watchers count on by themselves how long an engine is silent.

Invariant: a watcher is never left with an old state in silence. While the store fails it gets a `fault`. When the run
is deleted, the reading breaks or the service stops, it gets the `end`.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from buffer_service.admin.reading import read_run
from buffer_service.admin.run_values import whole
from buffer_service.domain.evaluations import EvaluationView
from buffer_service.domain.ops import RunView
from buffer_service.domain.ports import RunStore
from buffer_service.observability.diagnosis import SILENT_MS
from buffer_wire.errors import NotReady, RolloutBufferError, StoreFault, UnknownRun

log = structlog.get_logger(__name__)

PERIOD_S = 1.0
STORE_TIMEOUT_S = 5.0
MAX_WATCHERS = 128
"""Largest number of watchers of the process: a quarter of the connections that the admin page serves.

A page that watches keeps a second connection, by which it asks for the list of runs. So half of the connections are
left to probes and scrapes.
"""

MAX_OF_TOKEN = 96
"""Largest number of watchers with one token, so that whoever holds it cannot keep the others out."""

_HEARD_MS = 1_000
"""Reports of an engine that are less apart are one."""


@dataclass(frozen=True, slots=True)
class Told:
    """A message to watchers: `event` is `run`, `fault` or `end`, `data` JSON in one line."""

    event_id: str
    event: str
    data: str
    error: RolloutBufferError | None = None


class Feed:
    """Feed of one run's state, which is read while somebody watches."""

    def __init__(self, store: RunStore, run_id: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._run_id = run_id
        self._wall_clock = wall_clock
        # Ids of another process, or of an earlier reading, are none of this one.
        self._name = secrets.token_hex(4)
        self._number = 0
        self._seen: tuple[RunView, Sequence[EvaluationView], Sequence[bool]] | None = None
        self._heard_ms: dict[str, float] = {}
        self._news = asyncio.Event()
        self.watchers = 0
        self.task: asyncio.Task[None] | None = None
        self.told: Told | None = None
        """The newest; None before the first reading."""

    async def wait(self, seen: Told | None, timeout_s: float) -> None:
        """Return when there is something other than `seen`, or the timeout passes."""
        if self.told is seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()

    async def read_on(self) -> None:
        """Read the run's state again and again, with pauses of PERIOD_S, and tell watchers what has changed.

        While the store fails, watchers get a `fault`, and the reading goes on. When the run is deleted, or reading it
        breaks, they get the `end`, and this returns.
        """
        try:
            while True:
                try:
                    async with asyncio.timeout(STORE_TIMEOUT_S):
                        view, evaluations = await read_run(self._store, self._run_id)
                    self._look(view, evaluations)
                except StoreFault as fault:
                    self._fault(fault)
                except TimeoutError:
                    self._fault(StoreFault(f"the store did not answer within {STORE_TIMEOUT_S:.0f} s"))
                await asyncio.sleep(PERIOD_S)
        except UnknownRun as gone:
            self.end(gone)
        except Exception:
            log.exception("reading a run for the page failed", run=self._run_id)
            self.end(RolloutBufferError("the service failed to read the run; its log says more"))

    def end(self, error: RolloutBufferError) -> None:
        """Tell watchers that nothing more comes."""
        self._tell("end", {"reason": error.reason, "message": error.message}, error)

    def _look(self, view: RunView, evaluations: Sequence[EvaluationView]) -> None:
        now_ms = self._wall_clock() * 1_000
        heard_ms = {engine.engine_id: now_ms - engine.silent_ms for engine in view.engines}
        silent = [engine.silent_ms >= SILENT_MS for engine in view.engines]
        timeless = replace(view, engines=[replace(engine, silent_ms=0) for engine in view.engines])
        seen = (timeless, evaluations, silent)
        if seen == self._seen and not self._reported(heard_ms):
            return
        self._seen, self._heard_ms = seen, heard_ms
        self._tell("run", {"time_ms": round(now_ms), "run": whole(view, evaluations)})

    def _reported(self, heard_ms: dict[str, float]) -> bool:
        return any(abs(heard - self._heard_ms.get(name, 0)) > _HEARD_MS for name, heard in heard_ms.items())

    def _fault(self, fault: StoreFault) -> None:
        # The state is told again when the store is back, changed or not.
        self._seen = None
        if self.told is None or self.told.event != "fault":
            self._tell("fault", {"reason": fault.reason, "message": fault.message}, fault)

    def _tell(self, event: str, values: dict[str, object], error: RolloutBufferError | None = None) -> None:
        if self.told is not None and self.told.event == "end":
            return  # A reading that was under way when the service began to stop.
        self._number += 1
        data = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self.told = Told(f"{self._name}-{self._number}", event, data, error)
        news, self._news = self._news, asyncio.Event()
        news.set()


class Feeds:
    """The runs that are watched in this process."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._feeds: dict[str, Feed] = {}
        self._by_token: Counter[str] = Counter()
        self._stopped = False

    @contextlib.asynccontextmanager
    async def watch(self, run_id: str, token_id: str = "") -> AsyncIterator[Feed]:
        """The run's feed, after its first reading; `token_id` is empty for a caller without a token.

        Raises UnknownRun, StoreFault, NotReady.
        """
        if self._stopped:
            raise _stopping()
        if self._by_token.total() >= MAX_WATCHERS:
            raise NotReady(f"{MAX_WATCHERS} pages watch runs of this service already; no more are served")
        if token_id and self._by_token[token_id] >= MAX_OF_TOKEN:
            raise NotReady(f"{MAX_OF_TOKEN} pages with token {token_id!r} watch runs already; no more are served")
        feed = self._feeds.get(run_id)
        if feed is None or (feed.told is not None and feed.told.event == "end"):
            feed = self._feeds[run_id] = Feed(self._store, run_id)
            feed.task = asyncio.create_task(feed.read_on())
        feed.watchers += 1
        self._by_token[token_id] += 1
        try:
            await feed.wait(None, 2 * STORE_TIMEOUT_S)
            if feed.told is None:
                raise StoreFault("the store did not answer in time")
            if feed.told.error is not None:
                raise feed.told.error
            yield feed
        finally:
            feed.watchers -= 1
            self._by_token[token_id] -= 1
            if not self._by_token[token_id]:
                del self._by_token[token_id]
            if not feed.watchers:
                await self._forget(run_id, feed)

    def stop(self) -> None:
        """End every watch, for good."""
        self._stopped = True
        for feed in self._feeds.values():
            feed.end(_stopping())

    @property
    def watched(self) -> dict[str, int]:
        """Number of watchers, by run."""
        return {run_id: feed.watchers for run_id, feed in self._feeds.items()}

    async def _forget(self, run_id: str, feed: Feed) -> None:
        if self._feeds.get(run_id) is feed:
            del self._feeds[run_id]
        if feed.task is not None:
            feed.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feed.task


def _stopping() -> NotReady:
    return NotReady("the service is stopping")
