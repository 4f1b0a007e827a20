"""A fleet of a bout: two replicas of the service behind proxies, a trainer and workers, each a process or several."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from tests.chaos.client import BOUT, CALM, ENOUGH
from tests.chaos.papers import Papers
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import REPLICATED, Scenario
from tests.chaos.session import second_run
from tests.chaos.stores import NothingStruckError, Store
from tests.engine_matrix.truth import write_version
from tests.faults.cluster import rpc_processes
from tests.support.sentinels import free_port
from tests.support.service import RELEASED, ServiceProcess
from tests.support.sglang_python import sglang_python

WORKERS = ("w0", "w1")
ENGINES = ("e0", "e1")
EVALUATOR = "e2"
SKEW = Path(__file__).with_name("skew")
REWARD = "tests.workers.building:length_reward"
END_S = 100.0
RESTART_S = 0.2
"""Time after which a client that was killed is started again, as an init system does."""


def skewed(off_s: int) -> list[str]:
    """A command that a Python program's is the end of, whose wall clock is wrong by so much."""
    path = os.pathsep.join(filter(None, [str(SKEW), os.environ.get("PYTHONPATH", "")]))
    return ["/usr/bin/env", f"PYTHONPATH={path}", f"CLOCK_OFF_S={off_s}"] if off_s else []


async def engine_started(name: str, folder: Path) -> SglangLauncher:
    """A real SGLang server with weights of version 0, on a port that it keeps."""
    options = SglangServerOptions(
        python=sglang_python(),
        model_path=write_version(folder / "model", 0, 0),
        log_path=folder / f"{name}.sglang.log",
        port=free_port(),
        stop_grace_s=0.5,
    )
    launcher = SglangLauncher(options)
    await launcher.start()
    return launcher


async def _back(engine: SglangLauncher) -> None:
    await engine.stop()
    await engine.start()


@dataclass
class Client:
    """A client that is started again whenever it is killed, until it ends by itself."""

    name: str
    command: Sequence[str]
    """The life's number is put behind it where it is `counted`."""
    folder: Path
    environment: Mapping[str, str]
    counted: bool = True
    life: int = 0
    process: asyncio.subprocess.Process | None = None
    failed: str = ""
    wanted: bool = True

    async def run(self) -> None:
        """Live until it has ended in order, or is not wanted any more."""
        while self.wanted:
            self.life += 1
            command = [*self.command, str(self.life)] if self.counted else self.command
            with (self.folder / f"{self.name}.log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self.environment)
                )
            status = await self.process.wait()
            if status != -signal.SIGKILL:
                if status and self.wanted:
                    self.failed = f"{self.name} ended with {status}: {self._last_words()[-1]}"
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

    def _last_words(self) -> list[str]:
        """Lines that it said, without the frames of groups of errors."""
        said = (self.folder / f"{self.name}.log").read_text().splitlines()
        return [line for line in said if line.strip(" |+-0123456789")] or ["nothing was said"]


@dataclass
class Fleet:
    """Everything of a bout but its store."""

    folder: Path
    run_id: str
    scenario: Scenario
    store: Store
    rng: random.Random
    environment: Mapping[str, str]
    papers: Papers | None = None
    """Certificates and tokens, where there are any."""
    services: list[ServiceProcess] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    engines: list[SglangLauncher] = field(default_factory=list)
    """Real ones."""
    _lives: list[asyncio.Task[None]] = field(default_factory=list)
    _coming_back: "asyncio.Future[None] | None" = None

    def trainers(self) -> list[Client]:
        """Processes of trainers: one with its ranks, its feeder and an observer, and one that is a session."""
        return self.clients[:2]

    def workers(self) -> list[Client]:
        """Processes of workers: those that tell their history, and the product's own."""
        return self.clients[2:]

    def hosts(self) -> list[str]:
        """Addresses for clients."""
        return [proxy.host for proxy in self.proxies]

    async def start(self, settings: Mapping[str, object]) -> None:
        """Start the services, and the proxies before them."""
        if self.scenario.real:
            self.engines = [await engine_started(name, self.folder) for name in ENGINES]
        mine = {"rpc_processes": 2, "drain_grace_s": 1, "direct_from_bytes": self.scenario.direct_from_bytes}
        shared = {name: value for name, value in self.store.settings.items() if name != "data_dir"}
        data_dir = Path(str(self.store.settings.get("data_dir", self.folder / "a")))
        # Who brings its own store has no replica beside it.
        places = [data_dir, self.folder / "b"] if "store" in shared else [data_dir]
        for place, skew_s in zip(places, self.scenario.skew_s, strict=False):
            code = RELEASED if self.scenario.upgraded else None
            service = ServiceProcess(place, {**mine, **shared, **settings}, code=code, within=skewed(skew_s))
            self.services.append(service)
        for service in self.services:
            await asyncio.to_thread(service.start)
            self.proxies.append(Proxy(service.address, random.Random(self.rng.getrandbits(64))))
            await self.proxies[-1].open()
        waits = self.scenario.store in REPLICATED
        replicated = {name: self.scenario.policy[name] for name in ("wait_replicas", "wait_timeout_ms") if waits}
        told = {
            "run_id": self.run_id, "hosts": self.hosts(), "replicated": replicated, "real": self.scenario.real,
            "upgraded": self.scenario.upgraded,
        }  # fmt: skip
        (self.folder / BOUT).write_text(json.dumps(told))

    def start_clients(self) -> None:
        """Start trainers and workers."""
        python, folder = [sys.executable, "-m"], str(self.folder)
        commands = {
            "trainer": [*python, "tests.chaos.client", "trainer", folder, "trainer"],
            "session": [*python, "tests.chaos.session", folder, "session"],
            **{name: [*python, "tests.chaos.client", "worker", folder, name] for name in WORKERS},
        }
        self.clients = [Client(name, command, self.folder, self.environment) for name, command in commands.items()]
        for name in ENGINES if self.scenario.real or self.scenario.upgraded else (*ENGINES, EVALUATOR):
            self.clients.append(Client(name, self._worker(name), self.folder, self.environment, counted=False))
        self._lives = [asyncio.create_task(client.run()) for client in self.clients]

    def _worker(self, name: str) -> list[str]:
        """The command of one of the product's workers, with an engine."""
        engine = ["--simulate", "--tokens-per-s", "200"]
        if self.scenario.real:
            engine = ["--engine", self.engines[ENGINES.index(name)].base_url, "--stream-interval", "1"]
        return [
            sys.executable, "-m", "buffer_cli", "worker", "--address", "ipv4:" + ",".join(self.hosts()),
            "--run", second_run(self.run_id), "--reward", REWARD, "--worker-id", name,
            "--weights-dir", str(self.folder / f"{name}-weights"), *engine,
            "--groups-per-engine", "4", "--lease-wait-s", "1", "--evaluation-hold-s", "5",
            *(["--evaluations", "only"] if name == EVALUATOR else []),
        ]  # fmt: skip

    async def upgrade(self) -> None:
        """Restart the services, one after another, as those of this checkout."""
        for service in self.services:
            await asyncio.to_thread(service.stop)
            service.code = None
            await asyncio.to_thread(service.start)

    async def kill_engine(self, at: int) -> None:
        """Kill -9 a real engine, and have it come back by and by. Raises NothingStruckError while one does."""
        engine = self.engines[at % len(self.engines)]
        if self._coming_back is not None and not self._coming_back.done():
            raise NothingStruckError
        assert engine.pid is not None
        os.killpg(engine.pid, signal.SIGKILL)
        self._coming_back = asyncio.ensure_future(_back(engine))

    async def finish(self) -> None:
        """Have the trainer end the bout in order. Raises AssertionError where it does not, or a client has failed."""
        (self.folder / ENOUGH).touch()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(asyncio.shield(life) for life in self._lives[: len(self.trainers())]))
        except TimeoutError:
            raise AssertionError(f"the bout does not end within {END_S} s") from None
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
        if self._coming_back is not None:
            await self._coming_back

    def serving(self) -> list[int]:
        """Pids of all processes that serve RPCs."""
        return [pid for service in self.services for pid in rpc_processes(service)]

    async def end(self) -> None:
        """End all."""
        for client in self.clients:
            client.close()
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._coming_back is not None:
            self._coming_back.cancel()
        for engine in self.engines:
            await engine.stop()
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
