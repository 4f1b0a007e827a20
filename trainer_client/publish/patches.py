"""Patches of a version's files, made of the versions before it, so that workers fetch only what has changed."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from buffer_wire.limits import is_file_name
from buffer_wire.weights.patch import write_patch
from trainer_client.manifest import WeightFile, WeightPatch, checksum

logger = logging.getLogger("trainer_client")

MAX_PATCHES = 4
"""Limit on the patches of one file."""
_WORTH = 0.5
"""Largest part of a file that its patch may have: a larger one saves less than it costs to apply."""
_LARGE_BYTES = 64 << 10
"""Size from which on a file has patches."""
_MANY_FILES = 512
"""Number of files above which there are no patches: the manifest, which lists them, would grow beyond its limit."""


def with_patches(
    directory: Path, files: Sequence[WeightFile], bases: Sequence[tuple[Path, Mapping[str, str]]]
) -> tuple[WeightFile, ...]:
    """Write patches into `directory` and add them to its `files`. Blocking.

    `bases`: directories of older versions, each with the SHA-256 of its files, in hexadecimal, by their names. A patch
    that cannot be written is left out, and a warning says why.
    """
    if len(files) > _MANY_FILES:
        return tuple(files)
    names = {file.name for file in files}
    return tuple(
        replace(file, patches=tuple(_patches(directory, file, bases, names)))
        if file.size_bytes >= _LARGE_BYTES
        else file
        for file in files
    )


def _patches(
    directory: Path, file: WeightFile, bases: Sequence[tuple[Path, Mapping[str, str]]], names: Collection[str]
) -> list[WeightPatch]:
    made: dict[str, WeightPatch] = {}
    for base, listed in bases:
        sha256 = listed.get(file.name)
        name = f"{file.name}.from-{(sha256 or '')[:12]}.patch"
        if sha256 is None or sha256 == file.sha256.hex() or sha256 in made:
            continue
        if name in names or not is_file_name(name):
            # The source has such a file: the directory of a version that was published before, say.
            continue
        path = directory / name
        try:
            if write_patch(base / file.name, directory / file.name, path, max_bytes=int(file.size_bytes * _WORTH)):
                found = checksum(path)
                made[sha256] = WeightPatch(name, found.size_bytes, found.sha256, bytes.fromhex(sha256))
        except OSError as error:
            logger.warning("no patch from %s to %s: %s", base / file.name, directory / file.name, error)
            path.unlink(missing_ok=True)
    return list(made.values())
