"""Signals between producer and consumer of one side, beside what is measured: two numbers in shared memory, and two
pipes that wake the other.
"""

import mmap
import os
import struct
from pathlib import Path

_PIPES = ("consumer-ready", "batch-pushed")
_READY, _PUSHED = range(2)


class Signals:
    """Signals of one producer and one consumer, in a folder that both know."""

    def __init__(self, folder: Path) -> None:
        for name in _PIPES:
            if not (folder / name).exists():
                os.mkfifo(folder / name)
        with (folder / "numbers").open("a+b") as file:
            file.truncate(16)
            self._numbers = mmap.mmap(file.fileno(), 16)
        self._pipes = [os.open(folder / name, os.O_RDWR) for name in _PIPES]

    @property
    def is_over(self) -> bool:
        """True once the flow is to end."""
        return self._number(0) != 0

    def end(self) -> None:
        """Have the flow end."""
        self._put(0, 1)

    @property
    def pulled(self) -> int:
        """Groups pulled in this flow."""
        return self._number(1)

    def count_pulled(self, groups: int) -> None:
        """Note groups of the flow that have come."""
        self._put(1, self.pulled + groups)

    def begin(self) -> None:
        """Set everything back, while nobody waits."""
        self._put(0, 0)
        self._put(1, 0)

    def tell_ready(self) -> None:
        """Consumer: it waits for the next."""
        os.write(self._pipes[_READY], b"1")

    def wait_ready(self) -> None:
        """Producer: wait for that."""
        os.read(self._pipes[_READY], 1)

    def tell_pushed(self) -> None:
        """Producer: a batch is there."""
        os.write(self._pipes[_PUSHED], b"1")

    def wait_pushed(self) -> None:
        """Consumer: wait for that."""
        os.read(self._pipes[_PUSHED], 1)

    def _number(self, index: int) -> int:
        return int(struct.unpack_from("<q", self._numbers, 8 * index)[0])

    def _put(self, index: int, value: int) -> None:
        struct.pack_into("<q", self._numbers, 8 * index, value)
