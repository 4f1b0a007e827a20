"""The way between two sites: packets of one TUN device come out of the other, late, at a rate, and not all of them.

The TCP at both ends is the kernel's own. This stands in for `tc netem`, whose kernel module is not everywhere.

usage: link.py FD FD, with lines "DELAY_MS LOSS MBPS" on standard input
"""

import os
import random
import select
import sys
import time
from collections import deque

_QUEUE_S = 0.1
"""Longest time that a packet waits for the ones before it; beyond it is dropped, as a router does."""
_AT_ONCE = 64


class Direction:
    """One direction of the way. `loss` is a share of the packets, `delay_s` one way."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._flying: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0
        self._chance = random.Random(source)
        self.delay_s = self.loss = self.bytes_per_s = 0.0

    def take(self, now: float) -> None:
        """Take the packets that are there."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._source, 65_536)
            except BlockingIOError:
                return
            begin = max(self._free_at, now)
            if begin - now > _QUEUE_S or self._chance.random() < self.loss:
                continue
            self._free_at = begin + (len(packet) / self.bytes_per_s if self.bytes_per_s else 0.0)
            self._flying.append((self._free_at + self.delay_s, packet))

    def give(self, now: float) -> float:
        """Give out what is due; returns when the next is."""
        while self._flying and self._flying[0][0] <= now:
            try:
                os.write(self._sink, self._flying.popleft()[1])
            except (BlockingIOError, OSError):
                continue
        return self._flying[0][0] if self._flying else float("inf")


def main() -> None:
    """Carry packets until standard input ends."""
    first, second = map(int, sys.argv[1:])
    there, back = Direction(first, second), Direction(second, first)
    os.set_blocking(first, False)
    os.set_blocking(second, False)
    due = float("inf")
    while True:
        wait = None if due == float("inf") else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([first, second, sys.stdin], [], [], wait)
        now = time.monotonic()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            delay_ms, loss, mbps = map(float, line.split())
            for each in (there, back):
                each.delay_s, each.loss, each.bytes_per_s = delay_ms / 1000, loss, mbps * 125_000
        if first in ready:
            there.take(now)
        if second in ready:
            back.take(now)
        due = min(there.give(now), back.give(now))


if __name__ == "__main__":
    main()
