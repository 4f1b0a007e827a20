"""Commands that read payloads, as both readers send them, and the check of what comes."""

from collections.abc import Sequence
from dataclasses import dataclass

from buffer_wire.codec import Buffer
from buffer_wire.payloads.access import StoreAccess
from buffer_wire.payloads.keys import is_of, part_keys, parts_of, portions, size_of
from buffer_wire.resp.blocking import memory_of
from buffer_wire.resp.encoding import Parts


class Unreadable(Exception):
    """Reason why a read fails; `elsewhere`: what was asked for may be on another server by now."""

    def __init__(self, why: str, *, elsewhere: bool = False) -> None:
        super().__init__(why)
        self.elsewhere = elsewhere


@dataclass(frozen=True, slots=True)
class Ask:
    """One command: for several payloads whole, or for one, or a part of one.

    What it brings of one payload are the bytes [start, stop) of all `keys` end to end. `ends` is the payload that is
    whole with it.
    """

    shard: int
    command: Parts
    keys: Sequence[str]
    part: str = ""
    start: int = 0
    stop: int = 0
    ends: str = ""

    @property
    def size(self) -> int:
        """Number of bytes that it brings."""
        return self.stop - self.start if self.part else sum(map(size_of, self.keys))

    @property
    def is_whole(self) -> bool:
        """True for one payload that is no part."""
        return self.part != "" and self.part == self.ends

    def take(self, came: object, whole: memoryview, bodies: list[memoryview]) -> memoryview:
        """Add to `bodies` what is there with this reply. A part goes to its place in `whole`, or in new memory where it
        is the first; returns that memory. Raises Unreadable.
        """
        if self.is_whole:
            bodies.append(checked_body(self.ends, came))
        elif not self.part:
            if not isinstance(came, list) or len(came) != len(self.keys):
                raise Unreadable(f"MGET is answered {came!r:.200}")
            bodies += map(checked_body, self.keys, came)
        else:
            if came is None:
                raise Unreadable(f"{self.part} is not there")
            if not isinstance(came, Buffer) or len(came) != self.size:
                raise Unreadable(f"{self.part} is answered {came!r:.200}")
            whole = whole if self.start else memory_of(size_of(self.keys[0]))
            whole[self.start : self.stop] = came
            if self.ends:
                bodies.append(checked_body(self.ends, whole))
        return whole


def asks_for(keys: Sequence[str], portion_bytes: int, access: StoreAccess) -> list[Ask]:
    """Commands for the payloads in order: MGETs of portions, and a GET for each part of a payload in parts.

    No command names keys of two slots of a cluster, so there a payload has a GET of its own. Its shard is -1 where
    nobody serves the slot.
    """
    asks: list[Ask] = []
    for portion in portions(keys, portion_bytes):
        if not access.is_cluster and not parts_of(portion[0]):
            asks.append(Ask(0, ("MGET", *portion), portion))
            continue
        start = 0
        for key in portion:
            for part, left in zip(parts := part_keys(key), range(len(parts) - 1, -1, -1), strict=True):
                shard = access.shard_of(part.key)
                ends = "" if left else key
                asks.append(Ask(shard, ("GET", part.key), portion, part.key, start, start + part.size, ends))
                start += part.size
    return asks


def ahead(asks: Sequence[Ask], portion_bytes: int) -> list[int]:
    """Number of asks that are sent before each is received: itself, and half a portion at least that follows it."""
    sent, behind, until = 0, 0, []
    for index, ask in enumerate(asks):
        behind -= ask.size if index < sent else 0
        sent = max(sent, index + 1)
        while sent < len(asks) and behind < portion_bytes // 2:
            behind += asks[sent].size
            sent += 1
        until.append(sent)
    return until


def checked_body(key: str, body: object) -> memoryview:
    """The body, if it is what the key says. Raises Unreadable."""
    if body is None:
        raise Unreadable(f"{key} is not there")
    if not isinstance(body, Buffer):
        raise Unreadable(f"{key} is answered {body!r:.200}")
    if not is_of(key, body):
        differs = "fails its checksum" if len(body) == size_of(key) else f"has {len(body)} bytes"
        raise Unreadable(f"{key} {differs}")
    return memoryview(body).toreadonly()


def in_place_of_body(line: str) -> str:
    """Text of the line that came in place of a body."""
    size = line.removeprefix("$")
    if size == "-1":
        return "is not there"
    return f"has {size} bytes" if size.isdigit() else f"is answered {line!r}"
