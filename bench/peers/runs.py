"""Runs in which every side has its turn; the order moves on by one side with each run."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from bench.measure import forget_peak, resident_bytes
from bench.peers.groups import Size
from bench.peers.roles import REPLY_TIMEOUT_S, role
from bench.peers.sides.kinds import Kind, Server
from bench.peers.signals import Signals


@dataclass(frozen=True, slots=True)
class Plan:
    """Amount that is measured of each side in each run."""

    runs: int
    warm_s: float
    flow_s: float
    singles: int
    """Groups pushed at light load, after a tenth as many that do not count; 0: that and pulls are left out."""
    batches: int
    """Batches pulled, after two that do not count."""


QUICK = Plan(1, 0.4, 1.0, 40, 4)
FULL = Plan(5, 0.6, 2.5, 100, 8)


@dataclass(slots=True)
class Turn:
    """Figures of one side's turn: groups a second, CPU seconds a group by part, and times in seconds."""

    groups_per_s: float
    cpu_s: dict[str, float]
    direct: float | None
    """Part of the bytes that went directly; None where that is no question."""
    service_bytes: int = 0
    """Peak of the service's resident memory during the flow, above what it was before its first client."""
    latency_s: list[float] = field(default_factory=list)
    pull_s: list[float] = field(default_factory=list)


class Pair:
    """Producer and consumer of a kind, for any sizes in turn."""

    def __init__(self, stack: ExitStack, kind: Kind, python: Path, folder: Path) -> None:
        self._kind = kind
        self._signals = Signals(folder)
        module = f"bench.peers.sides.{kind.module}"
        self.producer, self.consumer = (
            stack.enter_context(role(python, module, which, folder)) for which in ("producer", "consumer")
        )

    def wait(self) -> None:
        """Wait until both have imported what they need."""
        self.producer.wait()
        self.consumer.wait()

    def open(self, queue: str, server: Server, size: Size) -> None:
        """Connect both to a server, with a queue of this name."""
        for end in (self.consumer, self.producer):
            end.call("open", queue, server.address, size)

    def close(self) -> None:
        """Disconnect both."""
        for end in (self.producer, self.consumer):
            end.call("close")

    def flow(self, server: Server, plan: Plan) -> Turn:
        """Flow, and everything out again."""
        self._signals.begin()
        pids = {**server.pids, "producer": [self.producer.pid], "consumer": [self.consumer.pid]}
        service = server.pids.get("service", ())
        for pid in service:
            forget_peak(pid)
        pushed, told = self._both("flow", plan.warm_s, plan.flow_s, pids, producer=())
        peak = sum(resident_bytes(pid, "VmHWM") for pid in service)
        self.consumer.call("rest", pushed)
        facts = [end.call("facts") for end in (self.producer, self.consumer)]
        direct = min((its["direct"] for its in facts if its), default=None)
        return Turn(told.pop("groups_per_s"), told, direct, peak)

    def _both(self, command: str, *arguments: object, producer: tuple[object, ...] | None = None) -> tuple[Any, Any]:
        """A command of both, side by side; what producer and consumer return. The first that fails is raised.

        `producer`: its arguments, where they are not those of the consumer.
        """
        self.consumer.start(command, *arguments)
        self.producer.start(command, *(arguments if producer is None else producer))
        ends = {end.connection: end for end in (self.producer, self.consumer)}
        results = {}
        while ends:
            wait([*ends], REPLY_TIMEOUT_S)
            for connection in [one for one in ends if one.poll()] or [*ends]:
                end = ends.pop(connection)
                results[end] = end.wait()
        return results[self.producer], results[self.consumer]

    def turn(self, queue: str, server: Server, size: Size, plan: Plan) -> Turn:
        """All that is measured of this side."""
        self.open(queue, server, size)
        turn = self.flow(server, plan)
        if self._kind.whole and plan.singles:
            warm = plan.singles // 10
            began, ended = self._both("singles", plan.singles + warm)
            turn.latency_s = [end - begin for begin, end in zip(began, ended, strict=True)][warm:]
            turn.pull_s = self._both("batches", plan.batches + 2)[1][2:]
        self.close()
        return turn


def run(
    pairs: dict[Kind, Pair], up: dict[Kind, Server], size: Size, plan: Plan, say: Callable[[str], None]
) -> dict[Kind, list[Turn]]:
    """All runs of one size, after a warm-up of every side that does not count."""
    kinds = [kind for kind in pairs if kind in up]
    turns: dict[Kind, list[Turn]] = {kind: [] for kind in kinds}
    idle = {kind: sum(map(resident_bytes, up[kind].pids.get("service", ()))) for kind in kinds}
    warm_up = Plan(1, 0.1, 0.4, 10, 1)
    for number in range(plan.runs + 1):
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            began = time.monotonic()
            turn = pairs[kind].turn(f"{kind.folder}-{number}", up[kind], size, plan if number else warm_up)
            if number:
                turn.service_bytes -= idle[kind]
                turns[kind].append(turn)
                what = f"{size.name}, run {number}/{plan.runs}, {kind.name}"
                say(f"{what}: {turn.groups_per_s:,.0f} groups/s ({time.monotonic() - began:.1f} s)")
        if not number:
            say(f"{size.name}: warmed up")
    return turns
