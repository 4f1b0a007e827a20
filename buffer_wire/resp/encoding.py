"""Commands as RESP, in pieces that are written one after the other."""

from collections.abc import Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Part: TypeAlias = str | int | Buffer
Parts: TypeAlias = Sequence[Part]

JOIN_BYTES = 1 << 14
"""Parts up to it are joined with their neighbours before they are written."""


def encode(commands: Sequence[Parts]) -> list[Buffer]:
    """Commands as RESP; large bodies stay what they are, all else is joined around them."""
    written: list[Buffer] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for part in command:
            data = part if isinstance(part, (bytes, bytearray, memoryview)) else str(part).encode()
            size = data.nbytes if isinstance(data, memoryview) else len(data)
            small += b"$%d\r\n" % size
            if size > JOIN_BYTES:
                written += (small, data)
                small = bytearray(b"\r\n")
            else:
                small += data
                small += b"\r\n"
    written.append(small)
    return written
