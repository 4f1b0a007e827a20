"""What a publish offers to the engines: files under one address, with size and checksum.

Invariant: the same manifest serializes to the same bytes, so that a repeated publish is recognised as one.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import weights_pb2 as pb

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file: `name` is a relative path with "/", `sha256` 32 bytes."""

    name: str
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class FilesManifest:
    """Files by address: `base_url` is an absolute directory path, or http(s)://… under which each name is served."""

    base_url: str
    files: tuple[WeightFile, ...]

    def to_wire(self) -> pb.WeightManifest:
        """The message."""
        files = [pb.WeightFile(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in self.files]
        return pb.WeightManifest(files=pb.FilesManifest(base_url=self.base_url, files=files))


def checksum(path: Path) -> WeightFile:
    """Size and SHA-256 of a file, under its own name."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return WeightFile(path.name, size, digest.digest())


def files_of(directory: Path) -> tuple[WeightFile, ...]:
    """Every regular file below `directory`, sorted by name. Raises InvalidField when there is none."""
    files = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        found = checksum(path)
        files.append(WeightFile(path.relative_to(directory).as_posix(), found.size_bytes, found.sha256))
    if not files:
        raise InvalidField("source", str(directory), "a directory with at least one file")
    return tuple(files)


def manifest_of(directory: Path) -> FilesManifest:
    """The manifest of a directory that every engine can read and that is not changed any more."""
    directory = directory.resolve()
    if not directory.is_dir():
        raise InvalidField("source", str(directory), "an existing directory")
    return FilesManifest(str(directory), files_of(directory))
