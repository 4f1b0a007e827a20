"""Surroundings of both suites: the candidate's command, the proxy before it, the record, and waits with deadlines."""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from buffer_conformance.child import Child, service_at
from buffer_conformance.direct import Direct
from buffer_conformance.faults import Fault
from buffer_conformance.proxy import Proxy
from buffer_conformance.record import Record
from buffer_wire.errors import InvalidField, RolloutBufferError

_POLL_S = 0.05


class Stuck(Exception):
    """A scenario cannot come to its end; the message says what it waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """Options of a suite: the candidate's command, its folder, the service, and the waits."""

    command: Sequence[str]
    """The candidate; {address} and {run} in it are filled in, and stand in RB_ADDRESS and RB_RUN."""
    folder: Path
    """Folder for the candidate's output."""
    service: str | None = None
    """Address (host:port) of the service; None: a service of the kit's own."""
    patience_s: float = 60.0
    """Longest time for one scenario."""
    lease_ttl_s: float = 6.0
    away_s: float = 3.0
    weights: Path | None = None
    """Directory of weights that are published, for workers that have to load some; None: versions without files."""
    only: frozenset[str] = field(default_factory=frozenset)
    """Scenarios to run; empty: all."""

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidField("--", "no command", "followed by the command that starts the candidate")


class Stage:
    """Surroundings of one suite: its proxy, its record, and the candidate's process."""

    def __init__(self, options: SuiteOptions, proxy: Proxy, run_id: str) -> None:
        self.options = options
        self.proxy = proxy
        self.record = proxy.record
        self.run_id = run_id
        self.child: Child | None = None

    async def start_candidate(self) -> None:
        """Start it, or start it again."""
        named = {"{address}": self.proxy.address, "{run}": self.run_id}
        command = list(self.options.command)
        for name, value in named.items():
            command = [word.replace(name, value) for word in command]
        self.record.mark("start", command=shlex.join(command))
        env = {"RB_ADDRESS": self.proxy.address, "RB_RUN": self.run_id}
        self.child = await Child.start(command, self.options.folder / "candidate.log", env)

    async def end_candidate(self, within_s: float, *, terminate: bool) -> None:
        """Wait for its exit, after SIGTERM if so wished; kill it when it does not come."""
        child = self._running()
        if terminate:
            self.record.mark("sigterm")
            child.terminate()
        code = await child.ended(within_s)
        if code is not None:
            self.record.mark("exit", code=code)
        await child.kill()

    def _running(self) -> Child:
        if self.child is None:
            raise Stuck("the candidate was not started")
        return self.child

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until it holds. Raises Stuck when it does not in time, or the candidate ends."""
        deadline = self.record.now_s() + self.options.patience_s
        while not holds():
            child = self.child
            if child is not None and child.exit_code is not None:
                raise Stuck(
                    f"the candidate ended with exit code {child.exit_code} before {what}; it said:\n{child.tail()}"
                )
            if self.record.now_s() > deadline:
                raise Stuck(f"waited in vain for {what}")
            await asyncio.sleep(_POLL_S)

    async def at_most(self, limit_s: float, holds: Callable[[], bool], what: str) -> None:
        """Wait until it holds, or until the time is over. Raises Stuck when the candidate ends."""
        by = self.record.now_s() + limit_s
        await self.until(lambda: holds() or self.record.now_s() > by, what)

    async def until_fired(self, fault: Fault, what: str) -> None:
        """Wait until a fault has struck. Raises Stuck."""
        try:
            await self.until(fault.fired.is_set, what)
        finally:
            fault.disarm()

    @contextlib.asynccontextmanager
    async def scenario(self, name: str) -> AsyncIterator[bool]:
        """Run a scenario; gives False when it is not to be run. A stuck scenario ends, and the record notes it."""
        wanted = not self.options.only or name in self.options.only
        if wanted:
            self.record.mark("scenario", name=name)
        try:
            yield wanted
        except Stuck as stuck:
            self.record.mark("stuck", name=name, why=str(stuck))
        finally:
            self.proxy.faults.release()

    @property
    def candidate_runs(self) -> bool:
        """True while the candidate's process runs."""
        return self.child is not None and self.child.exit_code is None


@contextlib.asynccontextmanager
async def staged(options: SuiteOptions) -> AsyncIterator[tuple[Stage, Direct]]:
    """A stage before a service, and the kit's own calls to that. Its run is new, and is deleted at the end.

    Raises DidNotStart, RolloutBufferError.
    """
    run_id = f"conformance-{uuid4().hex[:8]}"
    async with (
        service_at(options.service) as service,
        Proxy(service, Record()) as proxy,
        Direct(service, run_id) as direct,
    ):
        stage = Stage(options, proxy, run_id)
        try:
            yield stage, direct
        finally:
            stage.record.mark("end")
            if stage.child is not None:
                await stage.child.kill()
            with contextlib.suppress(RolloutBufferError):
                await direct.call("DeleteRun", trying_s=5.0)


@contextlib.asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do the work beside the block, and cancel it at the end. Raises its error after a block that raised none."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
