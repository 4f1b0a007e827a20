"""A primary, a replica and three Sentinels on loopback: real servers, in folders of their own, gone with the test.

With TLS they speak it to each other, and to clients on ports of their own; what the test asks goes without.

with sentinels() as deployment:
    store = await RedisRunStore.connect(deployment.url)
    deployment.primary.kill()
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from buffer_service.store.embedded.binary import find_binary
from tests.support.mortal import mortal

SERVICE = "buffer"
DOWN_AFTER_MS = 1_000
FAILOVER_TIMEOUT_MS = 3_000
"""Sentinels that split their votes try again after twice this time."""
PERIODS_MS = {"ping-period": 200, "info-period": 500, "publish-period": 300, "ask-period": 200, "tilt-period": 1_000}
"""Shorter than a Sentinel's own: they find each other sooner, and have asked a new primary several times before
DOWN_AFTER_MS. They do not look on for half a minute after the machine stood still for two seconds.
"""
START_TIMEOUT_S = 60.0
POLL_S = 0.02
QUORUM = 2


def free_port() -> int:
    """A port that nobody listens on, of the range that outgoing connections do not take."""
    for port in range(20_000 + os.getpid() * 16 % 12_000, 32_000):
        if port not in _given:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port
    raise RuntimeError("no port is free")


_given: set[int] = set()

Tls = tuple[Path, Path, Path]
"""Files of a certificate, of its key, and of the authorities."""


def tls_settings(tls: Tls | None) -> tuple[str, ...]:
    """Settings of a server that speaks TLS to its like."""
    if tls is None:
        return ()
    files = zip(("cert", "key", "ca-cert"), map(str, tls), strict=True)
    given = tuple(word for name, file in files for word in (f"--tls-{name}-file", file))
    return (*given, "--tls-replication", "yes", "--tls-auth-clients", "no")


class Server:
    """One server on a TCP port: a store, or a Sentinel when `config` is given. `tls`: it has one for TLS as well."""

    def __init__(self, binary: Path, *settings: str, config: str = "", tls: bool = False) -> None:
        self.port = free_port()
        self.tls_port = free_port() if tls else 0
        self.folder = Path(tempfile.mkdtemp(prefix="rbt-"))
        own = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--logfile", "log"]
        own += ["--tls-port", str(self.tls_port)] if tls else []
        if config:
            path = self.folder / "sentinel.conf"
            path.write_text(config)
            self.command = [str(binary), str(path), "--sentinel", *own, *settings]
        else:
            self.command = [str(binary), *own, "--save", "", "--repl-diskless-sync-delay", "0", *settings]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def known_port(self) -> int:
        """Port by which its like and clients know it."""
        return self.tls_port or self.port

    @property
    def host(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.known_port}"

    @property
    def url(self) -> str:
        """Address of this server alone."""
        return f"{'rediss' if self.tls_port else 'redis'}://{self.host}"

    def launch(self, *more: str) -> None:
        """Start it with these further settings. From the main thread alone: the server dies with the one it is from."""
        self.process = subprocess.Popen(
            mortal([*self.command, *more]),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.launch()
        self.until(lambda: self.ask("PING").startswith("+PONG"), "it answers")

    def follows(self, primary: "Server") -> bool:
        """True for a replica that has all that the primary has, by the word of both: each may be early."""
        return "master_link_status:up" in self.ask("INFO replication") and primary.reaches_one()

    def reaches_one(self) -> bool:
        """True for a primary when a replica acknowledges what it writes."""
        return self.ask("PUBLISH nobody nothing\r\nWAIT 1 100").endswith(":1\r\n+PONG\r\n")

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Poll until `met()`; the error quotes the log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not met():
            log = self.folder / "log"
            assert time.monotonic() < deadline, f"{what}: not in time; {log.read_text() if log.exists() else ''}"
            time.sleep(POLL_S)

    def ask(self, command: str) -> str:
        """The answer to a command, as it travels; empty when nobody answers."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(f"{command}\r\nPING\r\n".encode())
            answer = b""
            # The answer to the PING is the end, also where it is a refusal.
            while not (answer.endswith(b"\r\n") and answer.splitlines()[-1].startswith((b"+PONG", b"-"))):
                received = connection.recv(1 << 16)
                if not received:
                    break
                answer += received
            return answer.decode()
        return ""

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def halt(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing, as a host that is gone."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it and delete its folder."""
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Pair:
    """A primary and its replica; what they were at the start."""

    def __init__(self, binary: Path, *settings: str, tls: Tls | None = None) -> None:
        settings += tls_settings(tls)
        self.primary = Server(binary, *settings, tls=tls is not None)
        follows = ("--replicaof", "127.0.0.1", str(self.primary.known_port))
        self.replica = Server(binary, *follows, *settings, tls=tls is not None)

    def start(self) -> None:
        """Start both, and wait until the replica is in step."""
        self.primary.start()
        self.replica.start()
        self.replica.until(self.is_in_step, "the replica is in step")

    def is_in_step(self) -> bool:
        """The replica has all that the primary has."""
        return self.replica.follows(self.primary)

    def cut_off(self) -> None:
        """Nothing that is written from now on reaches the replica, until it goes on."""
        self.replica.halt()
        self.primary.ask("CLIENT KILL TYPE replica")

    def end(self) -> None:
        """End both."""
        for server in (self.replica, self.primary):
            server.end()


class Deployment(Pair):
    """A pair, known to three Sentinels as one service."""

    def __init__(
        self, binary: Path, *settings: str, tls: Tls | None = None, sentinel_binary: Path | None = None
    ) -> None:
        super().__init__(binary, *settings, tls=tls)
        monitor = f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.known_port} {QUORUM}"
        config = f"{monitor}\nsentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
        config += f"sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}\n"
        mine = tls_settings(tls)
        self.sentinels = [
            Server(sentinel_binary or binary, *mine, config=config, tls=tls is not None) for _ in range(3)
        ]

    @property
    def url(self) -> str:
        """Address for RedisRunStore.connect."""
        scheme = self.primary.url.partition(":")[0]
        return f"{scheme}+sentinel://{','.join(sentinel.host for sentinel in self.sentinels)}/{SERVICE}"

    def start(self) -> None:
        """Start all, and wait until the replica is in step and the Sentinels know each other."""
        super().start()
        for sentinel in self.sentinels:
            sentinel.start()
            periods = " ".join(f"{name} {period}" for name, period in PERIODS_MS.items())
            assert "+OK" in sentinel.ask(f"SENTINEL DEBUG {periods}")
        for sentinel in self.sentinels:
            sentinel.until(partial(self._sees_all, sentinel), "a Sentinel knows the others")

    async def promoted(self) -> None:
        """Wait until the Sentinels agree that the replica is the primary."""
        for sentinel in self.sentinels:
            await asyncio.to_thread(sentinel.until, partial(self._has_promoted, sentinel), "the replica is promoted")

    async def primary_back(self) -> None:
        """Start the killed primary again as a replica of the promoted one, and wait until it is in step."""
        self.primary.launch("--replicaof", "127.0.0.1", str(self.replica.known_port))
        await asyncio.to_thread(self.primary.until, partial(self.primary.follows, self.replica), "it is in step")

    def end(self) -> None:
        """End all."""
        for sentinel in self.sentinels:
            sentinel.end()
        super().end()

    def _has_promoted(self, sentinel: Server) -> bool:
        return str(self.replica.known_port) in sentinel.ask(f"SENTINEL get-master-addr-by-name {SERVICE}")

    @staticmethod
    def _sees_all(sentinel: Server) -> bool:
        lines = sentinel.ask(f"SENTINEL MASTER {SERVICE}").splitlines()
        facts = dict(zip(lines, lines[2:], strict=False))
        return (facts.get("num-other-sentinels"), facts.get("num-slaves")) == ("2", "1")


def _binary() -> Path:
    return find_binary(os.environ.get("RB_TEST_STORE_BINARY"))


@contextlib.contextmanager
def pair(*settings: str) -> Iterator[Pair]:
    """A running primary and replica; `settings` are of both."""
    servers = Pair(_binary(), *settings)
    try:
        servers.start()
        yield servers
    finally:
        servers.end()


@contextlib.contextmanager
def sentinels(*settings: str) -> Iterator[Deployment]:
    """A running deployment; `settings` are of the primary and the replica."""
    deployment = Deployment(_binary(), *settings)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.end()
