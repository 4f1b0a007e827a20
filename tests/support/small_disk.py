"""A file system of a few MB, to be filled. To make one takes root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes."""
        with (self.path / "filler").open("ab", buffering=0) as filler, suppress(OSError):
            while (room := self.room()) > left:
                filler.write(bytes(min(1 << 20, room - left)))

    def free(self) -> None:
        """Give back what was filled."""
        (self.path / "filler").unlink()

    def room(self) -> int:
        """Free bytes."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def size(self) -> int:
        """All bytes."""
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize


@contextmanager
def small_disk(path: Path, size: str = "16m") -> Iterator[SmallDisk]:
    """Mounted at a new folder while the context lasts; skips the test where that is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small-disk", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted: {error}")
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
