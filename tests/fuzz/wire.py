"""Damage to bytes of messages, as a bad client, a bad network library or a bad day does it. Seeded: the same generator
gives the same bytes.
"""

from collections.abc import Callable
from random import Random

VARINTS = (0, 1, 127, 128, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MAX_BYTES = 1 << 18
"""Most bytes of a damaged message: larger ones cost time and show nothing else."""


def varint(value: int) -> bytes:
    """Varint as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def random_bytes(rng: Random, at_most: int = 64) -> bytes:
    return rng.randbytes(rng.randint(0, at_most))


def _flip(rng: Random, raw: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)


def _cut(rng: Random, raw: bytearray) -> None:
    del raw[rng.randrange(len(raw)) :]


def _repeat(rng: Random, raw: bytearray) -> None:
    """A field, or whatever lies there, twice or more often."""
    begin = rng.randrange(len(raw))
    part = raw[begin : begin + rng.randint(1, 64)]
    raw[begin:begin] = part * rng.choice((1, 1, 2, 50))


def _insert(rng: Random, raw: bytearray) -> None:
    at = rng.randint(0, len(raw))
    raw[at:at] = random_bytes(rng, 16)


def _retype(rng: Random, raw: bytearray) -> None:
    """Another wire type in a byte that may be a tag; most tags lie at the beginning."""
    at = min(rng.randrange(len(raw)), rng.randrange(len(raw)))
    raw[at] = raw[at] & 0xF8 | rng.randrange(8)


def _length(rng: Random, raw: bytearray) -> None:
    """A length or number that is a huge one."""
    at = rng.randrange(len(raw))
    raw[at : at + 1] = varint(rng.choice(VARINTS))


def _endless(rng: Random, raw: bytearray) -> None:
    at = rng.randrange(len(raw))
    raw[at:at] = b"\xff" * rng.randint(9, 12)


def _nest(rng: Random, raw: bytearray) -> None:
    """Messages within messages, or groups that begin and do not end."""
    inner = bytes(raw[: rng.randint(0, len(raw))])
    if rng.random() < 0.3:
        raw[:] = b"\x0b" * rng.choice((10, 99, 101, 5_000))
        return
    for _ in range(rng.choice((2, 20, 99, 101, 400))):
        inner = varint(rng.randint(1, 12) << 3 | 2) + varint(len(inner)) + inner
    raw[:] = inner


def _not_text(rng: Random, raw: bytearray) -> None:
    at = rng.randrange(len(raw))
    bad = rng.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xf8\x88\x80\x80\x80"))
    raw[at : at + len(bad)] = bad


def _field(rng: Random, raw: bytearray) -> None:
    """Another field behind, known or not."""
    number = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 100, 19_000, (1 << 29) - 1, 0))
    kind = rng.randrange(6)
    body = {
        0: varint(rng.choice(VARINTS)),
        1: rng.randbytes(8),
        2: varint(size := rng.choice((0, 1, 8, 40))) + rng.randbytes(size),
        5: rng.randbytes(4),
    }.get(kind, b"")
    raw += varint(number << 3 | kind) + body


DAMAGES: tuple[Callable[[Random, bytearray], None], ...] = (
    _flip,
    _cut,
    _repeat,
    _insert,
    _retype,
    _length,
    _endless,
    _nest,
    _not_text,
    _field,
)


def damaged(rng: Random, message: bytes) -> bytes:
    """The message with one to three damages."""
    raw = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not raw:
            raw += random_bytes(rng) or b"\x00"
        rng.choice(DAMAGES)(rng, raw)
    return bytes(raw[:MAX_BYTES])
