"""Commands as RESP, in pieces that are written one after the other."""

from collections.abc import Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Part: TypeAlias = str | int | Buffer | tuple[Buffer, ...]
"""An argument of a command; pieces of one are sent one after the other."""
Parts: TypeAlias = Sequence[Part]

JOIN_BYTES = 1 << 14
"""Parts up to it are joined with their neighbours before they are written."""


def flat(data: Buffer) -> Buffer:
    """The bytes of an array's memory, which must be contiguous; anything else as it is."""
    if not isinstance(data, memoryview) or (data.format == "B" and data.ndim == 1):
        return data
    return data.cast("B") if data.nbytes else b""


def encode(commands: Sequence[Parts]) -> list[Buffer]:
    """Commands as RESP; large bodies stay what they are, all else is joined around them."""
    written: list[Buffer] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for part in command:
            encoded = part.encode() if isinstance(part, str) else b"%d" % part if isinstance(part, int) else part
            if isinstance(encoded, bytes) and len(encoded) <= JOIN_BYTES:
                small += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
                continue
            pieces = encoded if isinstance(encoded, tuple) else (encoded,)
            small += b"$%d\r\n" % sum(map(_size, pieces))
            for piece in pieces:
                if _size(piece) > JOIN_BYTES:
                    written += (small, piece)
                    small = bytearray()
                else:
                    small += piece
            small += b"\r\n"
    written.append(small)
    return written


def _size(data: Buffer) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)
