"""A nemesis: faults of a fleet and of its store, one after another, by a schedule that follows from the seed alone."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from buffer_wire.errors import UnknownRun
from tests.chaos.fleet import Fleet
from tests.chaos.proxy import FINE, Mood
from tests.chaos.session import second_run
from tests.chaos.stores import CLOCK_JUMPS, Fault, NothingStruckError
from tests.faults.calls import OPTIONS
from tests.faults.history import History
from tests.support.processes import alive
from tests.support.service import ServiceProcess
from trainer_client import AsyncBufferClient

PAUSE_S = (0.6, 2.6)
LASTS_S = (0.3, 2.5)
KILLS = 0.5
"""Part of the faults that are kills."""
MOODS = {
    "connections are slow": Mood(delay_s=0.08),
    "connections are lossy": Mood(losses=0.05),
    "connections are cut": Mood(refuses=True),
    "connections swallow everything": Mood(swallows=True),
}


@dataclass(frozen=True)
class Strike:
    """A fault that is due: so long after the one before, for so long; `at` chooses among what it may strike."""

    after_s: float
    lasts_s: float
    what: str
    at: int


class Nemesis:
    """Faults of one bout."""

    def __init__(self, fleet: Fleet, history: History, rng: random.Random) -> None:
        self._fleet = fleet
        self._history = history
        self._rng = rng
        self._at = 0
        self.kills: dict[str, Fault] = {
            "an rpc process is killed": Fault(self._kill_process, kills=True),
            "a service is killed": Fault(self._kill_service, kills=True),
            "a worker is killed": Fault(self._of_client(self._worker, signal.SIGKILL), kills=True),
            "a trainer is killed": Fault(self._of_client(self._trainer, signal.SIGKILL), kills=True),
            "everything but the store is killed": Fault(self._kill_all, kills=True),
        }
        if fleet.engines:
            self.kills["an engine is killed"] = Fault(lambda _: fleet.kill_engine(self._at), kills=True)
        self.others: dict[str, Fault] = {
            "the policy changes": Fault(self._change_policy),
            "a process stands still": Fault(self._of_client(self._anybody, signal.SIGSTOP)),
            "a service restarts": Fault(self._restart),
            **{name: Fault(self._mood(mood)) for name, mood in MOODS.items()},
        }
        if fleet.papers is not None:
            self.others["certificates are renewed"] = Fault(_done_by(fleet.papers.renew))
            self.others["tokens are rotated"] = Fault(_done_by(fleet.papers.rotate))
        for name, fault in fleet.store.faults.items():
            (self.kills if fault.kills else self.others)[name] = fault

    def next(self) -> Strike:
        """Draw the next strike: always the same draws, whatever happens meanwhile."""
        pause, lasts = self._rng.uniform(*PAUSE_S), self._rng.uniform(*LASTS_S)
        kind = self.kills if self._rng.random() < KILLS else self.others
        return Strike(pause, lasts, self._rng.choice(sorted(kind)), self._rng.randrange(1 << 16))

    async def run(self) -> None:
        """Strike until cancelled; what was begun is ended."""
        while True:
            strike = self.next()
            await asyncio.sleep(strike.after_s)
            await _to_the_end(self._strike(strike))

    async def _strike(self, strike: Strike) -> None:
        fault = {**self.kills, **self.others}[strike.what]
        self._at = strike.at
        given = {"what": strike.what, "kills": fault.kills, "lasts_s": round(strike.lasts_s, 2)}
        with suppress(NothingStruckError):
            await self._carried_out(fault, strike, given)

    async def _carried_out(self, fault: Fault, strike: Strike, given: Mapping[str, object]) -> None:
        async with self._history.call("nemesis", "strike", **given) as op:
            if fault.takes_back:
                async with self._history.call("nemesis", "failover", loses=False) as failover:
                    await fault.happen(strike.lasts_s)
                    failover.reply = {}
            elif strike.what == CLOCK_JUMPS:
                async with self._history.call("nemesis", "clock") as clock:
                    await fault.happen(strike.lasts_s)
                    clock.reply = {}
            else:
                await fault.happen(strike.lasts_s)
            op.reply = {}

    # ── processes ────────────────────────────────────────────────────────────

    def _one(self, pids: list[int]) -> int:
        running = sorted(pid for pid in pids if pid and alive(pid))
        if not running:
            raise NothingStruckError
        return running[self._at % len(running)]

    def _worker(self) -> int:
        return self._one([client.pid for client in self._fleet.workers()])

    def _trainer(self) -> int:
        return self._one([client.pid for client in self._fleet.trainers()])

    def _anybody(self) -> int:
        clients = [client.pid for client in self._fleet.clients]
        return self._one([*clients, *self._fleet.serving(), *self._fleet.store.pids()])

    def _of_client(self, choose: Callable[[], int], number: int) -> Callable[[float], Awaitable[None]]:
        async def happen(seconds: float) -> None:
            pid = choose()
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                if number == signal.SIGSTOP:
                    await asyncio.sleep(seconds)
                    os.kill(pid, signal.SIGCONT)

        return happen

    async def _kill_process(self, _seconds: float) -> None:
        os.kill(self._one(self._fleet.serving()), signal.SIGKILL)

    def _service(self) -> ServiceProcess:
        return self._fleet.services[self._at % len(self._fleet.services)]

    async def _kill_service(self, _seconds: float) -> None:
        service = self._service()
        service.kill()
        await asyncio.to_thread(service.start)

    async def _restart(self, _seconds: float) -> None:
        service = self._service()
        await asyncio.to_thread(service.stop)
        await asyncio.to_thread(service.start)

    async def _kill_all(self, _seconds: float) -> None:
        for client in self._fleet.clients:
            if client.pid:
                os.kill(client.pid, signal.SIGKILL)
        for service in self._fleet.services:
            service.kill()
        for service in self._fleet.services:
            await asyncio.to_thread(service.start)

    async def _change_policy(self, _seconds: float) -> None:
        changes = self._fleet.scenario.changes
        change = changes[self._at % len(changes)]
        async with AsyncBufferClient("ipv4:" + ",".join(self._fleet.hosts()), OPTIONS) as client:
            try:
                await client.update_policy(second_run(self._fleet.run_id), **change)
            except UnknownRun:
                raise NothingStruckError from None  # Its trainer has not begun it yet.

    # ── connections ──────────────────────────────────────────────────────────

    def _mood(self, mood: Mood) -> Callable[[float], Awaitable[None]]:
        async def happen(seconds: float) -> None:
            proxy = self._fleet.proxies[self._at % len(self._fleet.proxies)]
            proxy.be(mood)
            await asyncio.sleep(seconds)
            proxy.be(FINE)

        return happen


def _done_by(work: Callable[[], None]) -> Callable[[float], Awaitable[None]]:
    async def happen(_seconds: float) -> None:
        await asyncio.to_thread(work)

    return happen


async def _to_the_end(work: Awaitable[None]) -> None:
    """Do it; who is cancelled meanwhile waits for it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
