"""Kinds of sides, what each promises, and their servers: all of them at once, on free ports, for one size."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from bench import ours
from bench.measure import descendants
from bench.peers.groups import Size
from bench.peers.loops import BATCH
from bench.peers.roles import MALLOC, ROOT
from buffer_service.settings import Durability, Settings
from buffer_service.store.embedded.server import EmbeddedStore, die_with

_PIPELINE_BYTES = 1_000_000
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One side: its modules, and whether latency and pulls are measured too (`whole`)."""

    name: str
    module: str
    whole: bool = True

    @property
    def folder(self) -> str:
        """Name for files."""
        return self.name.replace(",", "").replace(" ", "-")


DIRECT = Kind("ours, direct", "ours")
RELAYED = Kind("ours, relayed", "ours")
STREAMS = Kind("Redis Streams", "streams")
PIPELINED = Kind("Redis Streams, pipelined", "streams", whole=False)
REVERB = Kind("Reverb", "reverb")
FLOOR = Kind("floor", "floor", whole=False)
KINDS = (DIRECT, RELAYED, STREAMS, PIPELINED, REVERB, FLOOR)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server of a side: what its clients connect to, and the processes by part."""

    address: dict[str, str]
    pids: Mapping[str, Sequence[int]]


def default_way(size: Size) -> Kind:
    """The way that groups of the size take where nobody says otherwise."""
    smallest = Settings.model_fields["direct_from_bytes"].default
    return DIRECT if size.group_bytes >= smallest else RELAYED


@contextmanager
def servers(size: Size, folder: Path, durability: str, reverb: Path | None) -> Iterator[dict[Kind, Server]]:
    """The servers of all sides. `reverb`: Python of its environment, None to leave it out."""
    with ExitStack() as stack:
        up: dict[Kind, Server] = {}
        for kind in (DIRECT, RELAYED):
            up[kind] = stack.enter_context(buffer(kind, size, folder, durability))
        store = stack.enter_context(redis_server(folder / "redis", durability))
        bundle = max(1, min(BATCH, _PIPELINE_BYTES // size.group_bytes))
        up[STREAMS] = up[FLOOR] = store
        if bundle > 1:
            up[PIPELINED] = Server({**store.address, "at_once": str(bundle)}, store.pids)
        if reverb is not None:
            up[REVERB] = stack.enter_context(_reverb_server(size, folder, reverb))
        yield {kind: up[kind] for kind in KINDS if kind in up}


@contextmanager
def buffer(kind: Kind, size: Size, folder: Path, durability: str, *flags: str) -> Iterator[Server]:
    """`rollout-buffer serve`: as it starts by default where that is the way of this size, else told to go this way."""
    told: tuple[str, ...] = ()
    if kind is not default_way(size):
        told = ("--direct-from-bytes", "0") if kind is DIRECT else ("--no-direct-payloads",)
    (home := folder / kind.folder).mkdir()
    with ours.service(home, durability, *told, *flags) as up:
        with redis.Redis(unix_socket_path=up.unix_socket) as client:
            store = int(client.info("server")["process_id"])
        service = [pid for pid in up.pids if pid != store]
        yield Server({"service": up.address, "socket": up.unix_socket}, {"service": service, "store": [store]})


@contextmanager
def redis_server(folder: Path, durability: str) -> Iterator[Server]:
    """A store as `serve` starts its own, for the queue by hand."""
    store = EmbeddedStore(folder, durability=Durability(durability))
    with asyncio.Runner() as runner:
        runner.run(store.start())
        try:
            yield Server({"socket": str(store.socket_path)}, {"store": [store.pid or 0]})
        finally:
            runner.run(store.stop())


@contextmanager
def _reverb_server(size: Size, folder: Path, python: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "reverb.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "bench.peers.sides.reverb", *map(str, (port, size.samples, size.tokens))],
            cwd=ROOT,
            env={**os.environ, **MALLOC},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - one thread is here
        )
        try:
            _wait_for(port, process)
            yield Server({"port": str(port)}, {"store": descendants(process.pid)})
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise RuntimeError("Reverb's server did not start")
