"""Manifests: the weights that a publish offers: files, tensors in files, an adapter, or what was broadcast.

Invariant: equal manifests serialize to the same bytes, so that a repeated publish is recognised.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import weights_pb2 as pb

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightFile:
    """File of weights: `name` is a relative path with "/", `sha256` 32 bytes."""

    name: str
    size_bytes: int
    sha256: bytes
    patches: tuple["WeightPatch", ...] = ()
    """Patches that make this file of older ones, at most 4."""


@dataclass(frozen=True, slots=True)
class WeightPatch:
    """Patch, itself a file `name`, that makes a WeightFile of the one whose SHA-256 is `base_sha256`."""

    name: str
    size_bytes: int
    sha256: bytes
    base_sha256: bytes


@dataclass(frozen=True, slots=True)
class FilesManifest:
    """Manifest of files: each name is found under `base_url`, an absolute directory path or an http(s)://… address."""

    base_url: str
    files: tuple[WeightFile, ...]
    mirrors: tuple[str, ...] = ()
    """Base URLs of relays that may have the files, by their SHA-256; they are asked before `base_url`."""

    def to_wire(self) -> pb.WeightManifest:
        """Convert to the wire's WeightManifest."""
        return pb.WeightManifest(files=self.listing())

    def listing(self) -> pb.FilesManifest:
        """Convert to the wire's FilesManifest, which the other kinds of manifest contain as well."""
        return pb.FilesManifest(**asdict(self))


@dataclass(frozen=True, slots=True)
class TensorsManifest:
    """Manifest of safetensors files whose tensors the workers hand to their engines by value; for small models.

    The engines need not be able to read the files, but must run on the workers' own machines.
    """

    files: FilesManifest

    def to_wire(self) -> pb.WeightManifest:
        """Convert to the wire's WeightManifest."""
        return pb.WeightManifest(tensors=pb.TensorsManifest(files=self.files.listing()))


@dataclass(frozen=True, slots=True)
class CollectiveManifest:
    """Manifest of weights that the members of a process group have already received by a broadcast."""

    membership: int
    """Membership number of the process group, from 1, as its members report it."""
    fallback: FilesManifest | None = None
    """Manifest of the same weights as files, for engines that were not members; None: those wait for the next version.
    """

    def to_wire(self) -> pb.WeightManifest:
        """Convert to the wire's WeightManifest."""
        collective = pb.CollectiveManifest(membership=self.membership)
        fallback = None if self.fallback is None else self.fallback.listing()
        return pb.WeightManifest(collective=collective, fallback=fallback)


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """Manifest of a LoRA adapter as PEFT writes it, which goes onto the weights that engines start with."""

    files: FilesManifest

    def to_wire(self) -> pb.WeightManifest:
        """Convert to the wire's WeightManifest."""
        return pb.WeightManifest(adapter=pb.AdapterManifest(files=self.files.listing()))


Manifest: TypeAlias = FilesManifest | TensorsManifest | CollectiveManifest | AdapterManifest


def checksum(path: Path) -> WeightFile:
    """Compute size and SHA-256 of a file; the name is the file's own."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return WeightFile(path.name, size, digest.digest())


def files_of(directory: Path) -> tuple[WeightFile, ...]:
    """List every regular file below `directory`, with checksums, sorted by name.

    Raises InvalidField when there is none.
    """
    files = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        found = checksum(path)
        files.append(WeightFile(path.relative_to(directory).as_posix(), found.size_bytes, found.sha256))
    if not files:
        raise InvalidField("source", str(directory), "a directory with at least one file")
    return tuple(files)


def manifest_of(directory: Path) -> FilesManifest:
    """Make the manifest of a directory that every engine can read and that is not changed any more.

    Raises InvalidField for a directory that does not exist or has no file.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise InvalidField("source", str(directory), "an existing directory")
    return FilesManifest(str(directory), files_of(directory))
