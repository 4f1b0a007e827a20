"""Clocks of processes, set while they run by libfaketime: each has a file that says by how much it is wrong.

Where the library is not there (Debian: libfaketime), nothing is wrong with any clock, and no clock can be set. The
monotonic clock is left alone: what a host's jumps do not touch is not touched here either. Servers alone have such
clocks: a program that forks beside its threads may find libfaketime's lock held for ever.
"""

import random
import shlex
import sys
from pathlib import Path

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


JUMPS_S = (-7_200, -30, 5, 700, 7_200)
FORWARD_S = (-5, 5, 700, 7_200)
"""Jumps, from where the clock is, of servers that vote by it: one that goes back takes as long to find a dead one."""


class Clock:
    """Clock of some processes."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.clock"
        self._folder, self._name = folder, name
        self.off_s = 0

    def set(self, off_s: int) -> None:
        """Have it be wrong by so many seconds."""
        self.off_s = off_s
        new = self._file.with_suffix(".new")
        new.write_text(f"{off_s:+d}")
        new.replace(self._file)

    def jump(self, rng: random.Random, *, forward: bool = False) -> None:
        """Have it be wrong by another amount than before; `forward`: never by much less."""
        if forward:
            self.set(self.off_s + rng.choice(FORWARD_S))
        else:
            self.set(rng.choice([jump for jump in JUMPS_S if jump != self.off_s]))

    def within(self) -> list[str]:
        """A command that the one of a process is the end of."""
        if LIBRARY is None:
            return []
        self.set(self.off_s)
        variables = {
            "LD_PRELOAD": LIBRARY,
            "FAKETIME_TIMESTAMP_FILE": self._file,
            "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
        }
        return ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items())]

    def wrapped(self, binary: Path) -> Path:
        """A program that is the binary with this clock."""
        made = self._folder / f"{self._name}-{binary.name}"
        made.write_text(f'#!/bin/sh\nexec {shlex.join([*self.within(), str(binary)])} "$@"\n')
        made.chmod(0o755)
        return made


def can_be_set() -> bool:
    """True where clocks can be wrong."""
    return LIBRARY is not None and sys.platform == "linux"
