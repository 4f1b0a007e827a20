"""Shards of a cluster: commands go to the primaries that serve their keys, wherever these are by now.

Invariants: what certainly did not run is sent again for PATIENCE_S, and nothing else. A former primary is left as soon
as the topology says so, which ends what waits for it. A shard that is away holds up nobody who asks nothing of it.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from buffer_service.domain.ops import ShardFacts, StorePlace, StoreShard
from buffer_service.store.address import Address
from buffer_service.store.payloads.every_node import EveryNode
from buffer_service.store.payloads.node import Node, Traffic
from buffer_service.store.payloads.topology import Place, Topology
from buffer_service.store.transport.refusals import NotRun, is_moved
from buffer_service.store.transport.replication import NOTHING, Wanted
from buffer_wire.errors import RolloutBufferError, StoreFault, StoreUnavailable
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ReplyError
from buffer_wire.resp.slots import slot_of

PATIENCE_S = 1.0
"""Longest wait, in seconds, of commands that were not sent or certainly did not run; callers come again."""
PAUSE_S = 0.02
FRESH_S = 0.1
"""Time, in seconds, for which the nodes' answer is fresh enough for clients: all of a shard may ask at once."""
WATCH_S = 1.0
"""Period, in seconds, of looking who the primaries are and whether they answer."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Errand:
    """Commands on one key, and what became of them: replies, or a failure. Error replies are failures."""

    key: str
    commands: Sequence[Parts]
    replies: list[Any] = field(default_factory=list)
    failure: RolloutBufferError | None = None
    is_unrun: bool = True
    """True while it certainly did not run."""
    asked: Place | None = None
    """Node that takes this one errand, as a slot is on its way there."""


class Shards:
    """Primaries of one cluster. Call `open`; `watch` is a loop that its owner keeps alive."""

    def __init__(self, url: str, *, ca: Path | None = None, timeout_s: float = 30.0, decides: bool = False) -> None:
        """`decides`: runs lie there, not payloads alone."""
        self.address = dataclasses.replace(Address.parse_cluster(url), ca=ca)
        self._decides = decides
        self.topology = Topology(self.address)
        self.every_node = EveryNode(self.address, self.topology)
        self._timeout_s = timeout_s
        self._nodes: dict[Place, Node] = {}
        self._said: set[str] = set()
        """Troubles that the log has, as of the last look."""
        self._place_anew_at = -FRESH_S

    async def open(self) -> None:
        """Find the primaries and look whether they suit. Raises StoreUnsuitable; StoreUnavailable when none answers."""
        await self.topology.refresh()
        failures = await self._look()
        if not self._nodes or len(failures) == len(self._nodes):
            raise failures[0] if failures else StoreUnavailable(self.address.shown, "nobody serves any slot")

    async def close(self) -> None:
        """End all connections."""
        for node in self._nodes.values():
            node.end("closed by this side")
        self.every_node.end()
        await self.topology.close()

    async def place(self, *, anew: bool) -> StorePlace:
        """Place of the shards, for clients; `anew`: ask the nodes first, if one answers."""
        now = time.monotonic()
        if anew and now >= self._place_anew_at + FRESH_S:
            with contextlib.suppress(StoreFault):
                await self.topology.refresh()
            # Not before: who comes meanwhile is not told what was true before.
            self._place_anew_at = max(self._place_anew_at, now)
        slots: defaultdict[Place, list[tuple[int, int]]] = defaultdict(list)
        for shard in self.topology.shards():
            slots[shard.primary].append((shard.first, shard.last))
        shards = [StoreShard(host, port, ranges) for (host, port), ranges in slots.items()]
        return StorePlace(self.address.shown, "", "", 0, self.address.tls, 0, is_cluster=True, shards=shards)

    def nodes(self) -> list[Node]:
        """The present primaries."""
        return list(self._nodes.values())

    async def facts(self) -> list[ShardFacts]:
        """Facts of the present primaries, by host and port."""
        places = sorted(self._nodes)
        found = await asyncio.gather(*(self._nodes[place].memory() for place in places))
        return [ShardFacts(f"{host}:{port}", *memory) for (host, port), memory in zip(places, found, strict=True)]

    async def watch(self) -> None:
        """Follow the topology, and look whether the primaries answer; runs until cancelled."""
        looking: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(WATCH_S)
                with contextlib.suppress(StoreFault):
                    await self.topology.refresh()
                self._leave_former()
                # One that answers nothing is waited for beside: it may be a former primary meanwhile.
                if looking is None or looking.done():
                    looking = asyncio.create_task(self._say_who_is_away(), name="payload-shards")
        finally:
            if looking is not None:
                looking.cancel()

    async def _say_who_is_away(self) -> None:
        try:
            away = {failure.message for failure in await self._look()}
        except StoreFault as error:
            away = {error.message}
        for why in away - self._said:
            log.warning("a shard of the cluster cannot be used", why=why)
        self._said = away

    async def run(
        self, traffic: Traffic, errands: Sequence[Errand], wanted: Wanted = NOTHING, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Carry errands out, those of each node in one write, and have their effects safe as `wanted` says."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        left: list[Errand] = list(errands)
        while True:
            by_place: defaultdict[Place, list[Errand]] = defaultdict(list)
            for errand in left:
                place = errand.asked or self.topology.primary_of(slot_of(errand.key))
                if place is None:
                    errand.failure = StoreUnavailable(self.address.shown, f"nobody serves the slot of {errand.key}")
                else:
                    by_place[place].append(errand)
            if len(by_place) == 1:
                ((place, its),) = by_place.items()
                await self._run_at(place, traffic, its, wanted)
            else:
                await asyncio.gather(*(self._run_at(place, traffic, its, wanted) for place, its in by_place.items()))
            left = [errand for errand in left if errand.failure is not None and errand.is_unrun]
            if not left or loop.time() >= until:
                return
            if not any(errand.asked for errand in left):
                await self._find_anew()

    async def at(self, slot: int, act: Callable[[Node], Awaitable[T]]) -> T:
        """Do something at the primary of a slot, and again, for PATIENCE_S, where NotRun says that nothing ran.

        A script does not follow ASK: of its keys only the first would be asked for at the other node.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            place = self.topology.primary_of(slot)
            failure = StoreUnavailable(self.address.shown, f"nobody serves slot {slot}")
            if place is not None:
                try:
                    return await act(self._node(place))
                except NotRun as error:
                    failure = error.failure
                    if error.reply is not None and error.reply.code == "MOVED":
                        self.topology.has_moved(slot, _told(error.reply, place))
            if loop.time() >= until:
                raise failure
            await self._find_anew()

    async def _find_anew(self) -> None:
        with contextlib.suppress(StoreFault):
            await self.topology.refresh()
        self._leave_former()
        await asyncio.sleep(PAUSE_S)

    def place_of(self, key: str) -> Place | None:
        """Primary that serves a key, as far as is known."""
        return self.topology.primary_of(slot_of(key))

    async def _run_at(self, place: Place, traffic: Traffic, errands: Sequence[Errand], wanted: Wanted) -> None:
        node = self._node(place)
        commands: list[Parts] = []
        for errand in errands:
            for command in errand.commands:
                if errand.asked is not None:
                    commands.append(("ASKING",))
                commands.append(command)
        try:
            replies, at = await node.request(traffic, commands)
        except NotRun as error:
            _fail(errands, error.failure, is_unrun=True)
            return
        except RolloutBufferError as error:
            _fail(errands, error, is_unrun=False)
            return
        taken, first = [], 0
        for errand in errands:
            step = 1 if errand.asked is None else 2
            last = first + step * len(errand.commands)
            self._take(errand, node, place, replies[first + step - 1 : last : step])
            first = last
            if errand.failure is None:
                taken.append(errand)
        if taken and (wanted.replicas or at.appends):
            try:
                await node.keep(wanted, at)
            except RolloutBufferError as error:
                _fail(taken, error, is_unrun=False)

    def _take(self, errand: Errand, node: Node, place: Place, replies: list[Any]) -> None:
        """Take the replies to an errand's commands. Only the first commands of an errand may have run in vain."""
        errand.asked = errand.failure = None
        errand.is_unrun = False
        errand.replies = replies
        for reply in replies:
            if not isinstance(reply, ReplyError):
                continue
            if is_moved(reply):
                if reply.code == "ASK":
                    errand.asked = _told(reply, place)
                elif reply.code == "MOVED":
                    self.topology.has_moved(slot_of(errand.key), _told(reply, place))
                errand.failure, errand.is_unrun = StoreUnavailable(node.name, f"it goes on to answer: {reply}"), True
            else:
                try:
                    node.checked(reply)
                except RolloutBufferError as error:
                    errand.failure = error
            return

    def _node(self, place: Place) -> Node:
        node = self._nodes.get(place)
        if node is None:
            own_key = partial(self.topology.key_at, place)
            node = self._nodes[place] = Node(self.address.at(*place), self._timeout_s, own_key, decides=self._decides)
        return node

    def _leave_former(self) -> None:
        living = self.topology.primaries()
        for place in self._nodes.keys() - living:
            self._nodes.pop(place).end("it is a primary no more")

    async def _look(self) -> list[StoreUnavailable]:
        """See who is away. Raises StoreUnsuitable for a primary that must not be used."""
        self._leave_former()
        nodes = [self._node(place) for place in self.topology.primaries()]
        outcomes = await asyncio.gather(*(node.look() for node in nodes), return_exceptions=True)
        away: list[StoreUnavailable] = []
        for outcome in outcomes:
            if isinstance(outcome, StoreUnavailable):
                away.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return away


def _told(reply: ReplyError, place: Place) -> Place:
    """Node that MOVED or ASK of the node at `place` names."""
    host, _, port = str(reply).split(" ")[2].rpartition(":")
    return host.strip("[]") or place[0], int(port)


def failure_of(errands: Iterable[Errand]) -> RolloutBufferError | None:
    """The first failure among errands."""
    return next((errand.failure for errand in errands if errand.failure is not None), None)


def _fail(errands: Iterable[Errand], failure: RolloutBufferError, *, is_unrun: bool) -> None:
    for errand in errands:
        errand.failure, errand.is_unrun, errand.asked = failure, is_unrun, None
