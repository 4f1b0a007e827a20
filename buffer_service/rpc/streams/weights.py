"""Published weights as a stream: the present state first, then every change; superseded ones may be skipped. The same
state is sent again when there is room among the engines that may load, after there was none.

However many workers watch a run on this replica, one of them follows it for all: a change is read from the store once
and serialized once, and nobody else wakes up before there is one.
"""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.ages import StreamAges
from buffer_service.rpc.flow.waiting import WaitingLines
from rollout_buffer.v1 import weights_pb2

FRESH_S = 0.5
"""Largest age, in seconds, of the state that a new watch is told when no hint came since; hints can be lost."""


@dataclass(slots=True)
class _Run:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    watchers: int = 0
    follower: asyncio.Task[None] | None = None
    state: tuple[ops.WeightVersion, bytes, bool, bytes] | None = None
    might_load: bool = True
    ticket: int = -1
    taken_s: float = 0.0
    told: int = 0
    """Number of the newest message; 0: there is none yet."""
    message: bytes = b""
    error: Exception | None = None
    """Reason why the run can be followed no longer."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Event of the next message, or of the error."""

    def wake(self) -> None:
        """Wake all who watch; who waits from now on waits for what comes after."""
        self.news.set()
        self.news = asyncio.Event()


class WeightsFeed:
    """The watches of one replica."""

    def __init__(self, store: RunStore, lines: WaitingLines, ages: StreamAges) -> None:
        self._store = store
        self._lines = lines
        self._ages = ages
        self._runs: dict[str, _Run] = {}

    async def messages(self, run_id: str) -> AsyncGenerator[bytes]:
        """Stream of the published weights as serialized WatchWeightsResponses, until its age.

        Raises UnknownRun, and NotReady when the process shuts down.
        """
        run = self._runs.setdefault(run_id, _Run())
        run.watchers += 1
        told = 0
        ends_at = self._ages.ends_at()
        try:
            await self._read(run_id, run)
            if run.follower is None:
                # In a context of its own: it works for all who watch.
                run.follower = asyncio.create_task(self._follow(run_id, run), context=contextvars.Context())
            while not self._ages.passed("WatchWeights", ends_at):
                if run.error is not None:
                    raise run.error.with_traceback(None)
                if told != run.told:
                    told = run.told
                    yield run.message
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(ends_at):
                            await run.news.wait()
        finally:
            run.watchers -= 1
            if not run.watchers:
                self._leave(run_id, run)

    async def _follow(self, run_id: str, run: _Run) -> None:
        try:
            while True:
                await self._lines.hint(run_id, Topic.WEIGHTS, run.ticket)
                await self._read(run_id, run)
        except Exception as error:  # noqa: BLE001 - each watch raises it
            run.error = error
            self._leave(run_id, run)
            run.wake()

    async def _read(self, run_id: str, run: _Run) -> None:
        """Have a fresh state, and tell it if it is news."""
        async with run.lock:
            ticket = self._lines.ticket(run_id, Topic.WEIGHTS)
            if run.told and run.ticket == ticket and time.monotonic() - run.taken_s <= FRESH_S:
                return
            view = await self._store.call(commands.weights(run_id))
            run.ticket, run.taken_s = ticket, time.monotonic()
            state = (view.published, view.manifest, view.paused, view.plan)
            # Whoever waits for a permit asks again when it hears anything.
            asks_again = view.may_load and not run.might_load
            run.might_load = view.may_load
            if state != run.state or asks_again:
                run.state = state
                run.message = fields.reply(weights_pb2.WatchWeightsResponse, view).SerializeToString()
                run.told += 1
                run.wake()

    def _leave(self, run_id: str, run: _Run) -> None:
        """Follow a run no longer."""
        if self._runs.get(run_id) is run:
            del self._runs[run_id]
        if run.follower is not None and run.follower is not asyncio.current_task():
            run.follower.cancel()
