"""Two services over one store, each of two rpc processes, and the ways in which they are killed.

Clients are given both addresses, in either order: gRPC goes to the other one when the first does not answer.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.history import History
from tests.support.processes import alive, children, command
from tests.support.service import ServiceProcess
from tests.support.store_server import StoreServer

STALL_EVENTS = 60
"""Time that a stalled process stands, in events of the others; how long a disk is full at most."""
FULL_S = 2.0
FEW_WRITES = 20_000
"""Bytes."""
KILLED_WHEN_FULL = 0.7
PACE = (80, 260)
"""Events between two strikes."""
DIRECT_FROM_BYTES = 1_000
"""Size from which on groups go directly: about half of those that the workers of a history make."""


class Cluster:
    """The two services."""

    def __init__(self, folder: Path, store: str, **more: object) -> None:
        settings = {
            "rpc_processes": 2, "drain_grace_s": 1, "store": store, "direct_from_bytes": DIRECT_FROM_BYTES, **more,
        }  # fmt: skip
        self.services = [ServiceProcess(folder / name, settings) for name in ("a", "b")]

    def target(self, rng: random.Random) -> str:
        """Address for a client: both, in random order."""
        hosts = [service.address for service in self.services]
        rng.shuffle(hosts)
        return "ipv4:" + ",".join(hosts)

    def heal(self) -> None:
        """Start what is down."""
        for service in self.services:
            if service.process is None or service.process.poll() is not None:
                service.start()

    def stop(self) -> None:
        """End both."""
        for service in self.services:
            if service.process is not None and service.process.poll() is None:
                service.kill()


@contextmanager
def running_cluster(folder: Path, store: str, **more: object) -> Iterator[Cluster]:
    """Two running services; `more`: other settings of both."""
    cluster = Cluster(folder, store, **more)
    try:
        cluster.heal()
        yield cluster
    finally:
        cluster.stop()


def rpc_processes(service: ServiceProcess) -> list[int]:
    """Pids of those that serve at the moment."""
    return [pid for pid in children(service.pid) if "buffer_service.app" in command(pid)]


class Nemesis:
    """Strikes after a random number of events of the history, one strike after another, until there are enough.

    `store` is killed and started again, cut off, and finds its disk full, where the test has one that survives it.
    `gently`: services as a whole are left alone, which cannot start while the store is away.
    """

    def __init__(
        self,
        cluster: Cluster,
        history: History,
        rng: random.Random,
        enough: Callable[[], bool],
        store: StoreServer | None = None,
        *,
        gently: bool = False,
    ) -> None:
        self._cluster = cluster
        self._history = history
        self._rng = rng
        self._enough = enough
        self._store = store
        self._gently = gently
        self.strikes = 0

    async def run(self) -> None:
        """Strike until there are enough; leaves everything running or on its way."""
        ways = [self._kill_process, self._kill_process, self._stall]
        if not self._gently:
            ways += [self._kill_service, self._restart]
        if self._store is not None:
            ways += [self._kill_store, self._fill_disk, self._cut_store_off]
        while not self._enough():
            await self._history.passed(self._rng.randint(*PACE))
            await self._rng.choice(ways)(self._rng.choice(self._cluster.services))
            self.strikes += 1
            self._history.tick()

    async def _kill_process(self, service: ServiceProcess) -> None:
        self._say("kill a process", service)
        self._signal(service, signal.SIGKILL)

    async def _kill_service(self, service: ServiceProcess) -> None:
        self._say("kill a service", service)
        await _to_the_end(self._killed_and_started, service)

    async def _restart(self, service: ServiceProcess) -> None:
        self._say("restart a service", service)
        await _to_the_end(self._stopped_and_started, service)

    async def _stall(self, service: ServiceProcess) -> None:
        """A process that stands still, as on a host that swaps, and then goes on with what it was about to do."""
        self._say("stall a process", service)
        pid = self._signal(service, signal.SIGSTOP)
        try:
            # Those who wait for it make no events: the last one may be the only one who could.
            async with asyncio.timeout(2.0):
                await self._history.passed(STALL_EVENTS)
        except TimeoutError:
            pass
        finally:
            if pid and alive(pid):
                os.kill(pid, signal.SIGCONT)

    async def _kill_store(self, service: ServiceProcess) -> None:
        self._say("kill the store", service)
        self._restart_store()

    async def _cut_store_off(self, service: ServiceProcess) -> None:
        """End every connection to the store: the services', and those of clients that write and read payloads."""
        assert self._store is not None
        self._say("cut the store off", service)
        self._store.cut_off()

    async def _fill_disk(self, service: ServiceProcess) -> None:
        """Room for a few more writes; it comes again by itself, or with the next life of a store that is killed."""
        assert self._store is not None
        killed = self._rng.random() < KILLED_WHEN_FULL
        self._say(f"fill the store's disk{', kill the store' if killed else ''}", service)
        self._store.fill_disk(left=self._rng.randint(0, FEW_WRITES))
        try:
            async with asyncio.timeout(FULL_S):
                await self._history.passed(self._rng.randint(1, STALL_EVENTS))
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._store.free_disk()
            raise
        if killed:
            # Nobody is left who knows what it had acknowledged.
            for process in (pid for each in self._cluster.services for pid in rpc_processes(each)):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            # Views show what the store has, and that includes writes that it could not append, nor was acknowledged.
            self._history.note("nemesis", "failover", loses=False)
            self._restart_store()
        else:
            self._store.free_disk()

    def _restart_store(self) -> None:
        assert self._store is not None
        self._store.kill()
        self._store.start()

    def _signal(self, service: ServiceProcess, number: int) -> int:
        pids = rpc_processes(service)
        if not pids:
            return 0
        pid = self._rng.choice(sorted(pids))
        os.kill(pid, number)
        return pid

    def _say(self, what: str, service: ServiceProcess) -> None:
        self._history.note("nemesis", "strike", what=what, target=service.data_dir.name)

    @staticmethod
    def _killed_and_started(service: ServiceProcess) -> None:
        service.kill()
        service.start()

    @staticmethod
    def _stopped_and_started(service: ServiceProcess) -> None:
        service.stop()
        service.start()


async def _to_the_end(work: Callable[[ServiceProcess], None], service: ServiceProcess) -> None:
    """Do it in a thread; who is cancelled meanwhile waits for it."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, service))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        await thread
        raise
