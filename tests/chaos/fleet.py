"""A fleet of a round: two replicas of the service behind proxies, a trainer and workers, each a process or several."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.client import CALM, ENOUGH, ROUND
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import Scenario
from tests.chaos.stores import Store
from tests.faults.cluster import rpc_processes
from tests.support.service import ServiceProcess

WORKERS = 3
END_S = 100.0
RESTART_S = 0.2
"""Time after which a client that was killed is started again, as an init system does."""


@dataclass
class Client:
    """A client that is started again whenever it is killed, until it ends by itself."""

    kind: str
    name: str
    folder: Path
    environment: Mapping[str, str]
    life: int = 0
    process: asyncio.subprocess.Process | None = None
    failed: str = ""
    wanted: bool = True

    async def run(self) -> None:
        """Live until it has ended in order, or is not wanted any more."""
        while self.wanted:
            self.life += 1
            command = [sys.executable, "-m", "tests.chaos.client", self.kind, self.folder, self.name, str(self.life)]
            with (self.folder / f"{self.name}.log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *map(str, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self.environment)
                )
            status = await self.process.wait()
            if status != -signal.SIGKILL:
                if status and self.wanted:
                    self.failed = f"{self.name} ended with {status}: {self._last_words()}"
                return
            await asyncio.sleep(RESTART_S)

    @property
    def pid(self) -> int:
        """Its process; 0 while there is none."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    def close(self) -> None:
        """Have it end."""
        self.wanted = False
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()[-1500:]


@dataclass
class Fleet:
    """Everything of a round but its store."""

    folder: Path
    run_id: str
    scenario: Scenario
    store: Store
    rng: random.Random
    environment: Mapping[str, str]
    services: list[ServiceProcess] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    _lives: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def trainer(self) -> Client:
        """The trainer's process, with its ranks, its feeder and an observer."""
        return self.clients[0]

    def workers(self) -> list[Client]:
        """Processes of workers."""
        return self.clients[1:]

    def hosts(self) -> list[str]:
        """Addresses for clients."""
        return [proxy.host for proxy in self.proxies]

    async def start(self, settings: Mapping[str, object]) -> None:
        """Start the services, and the proxies before them."""
        mine = {"rpc_processes": 2, "drain_grace_s": 1, "direct_from_bytes": self.scenario.direct_from_bytes}
        shared = {name: value for name, value in self.store.settings.items() if name != "data_dir"}
        data_dir = Path(str(self.store.settings.get("data_dir", self.folder / "a")))
        self.services.append(ServiceProcess(data_dir, {**mine, **shared, **settings}))
        if "store" in shared:
            self.services.append(ServiceProcess(self.folder / "b", {**mine, **shared, **settings}))
        for service in self.services:
            await asyncio.to_thread(service.start)
            self.proxies.append(Proxy(service.address, random.Random(self.rng.getrandbits(64))))
            await self.proxies[-1].open()
        (self.folder / ROUND).write_text(json.dumps({"run_id": self.run_id, "hosts": self.hosts()}))

    def start_clients(self) -> None:
        """Start the trainer and the workers."""
        self.clients = [
            Client(kind, name, self.folder, self.environment)
            for kind, name in [("trainer", "trainer"), *(("worker", f"w{number}") for number in range(WORKERS))]
        ]
        self._lives = [asyncio.create_task(client.run()) for client in self.clients]

    async def finish(self) -> None:
        """Have the trainer end the round in order. Raises AssertionError where it does not, or a client has failed."""
        (self.folder / ENOUGH).touch()
        try:
            await asyncio.wait_for(asyncio.shield(self._lives[0]), END_S)
        except TimeoutError:
            raise AssertionError(f"the round does not end within {END_S} s") from None
        (self.folder / CALM).touch()
        for client in self.clients:
            client.close()
        await asyncio.gather(*self._lives)
        failed = [client.failed for client in self.clients if client.failed]
        assert not failed, "\n".join(failed)

    async def heal(self) -> None:
        """Start services that are down, let connections pass, wake who sleeps."""
        for proxy in self.proxies:
            proxy.be(type(proxy.mood)())
        for client in self.clients:
            if client.pid:
                os.kill(client.pid, signal.SIGCONT)
        for service in self.services:
            if service.process is None or service.process.poll() is not None:
                await asyncio.to_thread(service.start)

    def serving(self) -> list[int]:
        """Pids of all processes that serve RPCs."""
        return [pid for service in self.services for pid in rpc_processes(service)]

    async def end(self) -> None:
        """End all."""
        for client in self.clients:
            client.close()
        await asyncio.gather(*self._lives, return_exceptions=True)
        for proxy in self.proxies:
            await proxy.close()
        for service in self.services:
            if service.process is not None and service.process.poll() is None:
                service.kill()


@contextlib.asynccontextmanager
async def running(fleet: Fleet, settings: Mapping[str, object]) -> AsyncIterator[Fleet]:
    """Services and proxies, while the context lasts."""
    try:
        await fleet.start(settings)
        yield fleet
    finally:
        await fleet.end()
