"""What a publish offers to the engines: files under one address, tensors in files, or what a process group received.

Invariant: the same manifest serializes to the same bytes, so that a repeated publish is recognised as one.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
        return pb.WeightManifest(files=self.listing())

    def listing(self) -> pb.FilesManifest:
        """The part of the message that other kinds hold as well."""
        files = [pb.WeightFile(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in self.files]
        return pb.FilesManifest(base_url=self.base_url, files=files)


@dataclass(frozen=True, slots=True)
class TensorsManifest:
    """Safetensors files whose tensors the workers hand to their engines by value, for small models.

    The engines need not be able to read the files, but must be on the workers' own machines.
    """

    files: FilesManifest

    def to_wire(self) -> pb.WeightManifest:
        """The message."""
        return pb.WeightManifest(tensors=pb.TensorsManifest(files=self.files.listing()))


@dataclass(frozen=True, slots=True)
class CollectiveManifest:
    """Weights that the members of a process group have received already."""

    membership: int
    """Number of the group, from 1, as its members report it."""
    fallback: FilesManifest | None = None
    """The same weights as files, for engines that were no members; None: they wait for the next version."""

    def to_wire(self) -> pb.WeightManifest:
        """The message."""
        collective = pb.CollectiveManifest(membership=self.membership)
        fallback = None if self.fallback is None else self.fallback.listing()
        return pb.WeightManifest(collective=collective, fallback=fallback)


Manifest: TypeAlias = FilesManifest | TensorsManifest | CollectiveManifest


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
