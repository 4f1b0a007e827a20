"""Files of the versions that are here, of which a new version's files are made: the same ones, or by patches.

Invariant: what is made is checked as what is fetched; so a wrong patch, or base, costs a fetch and nothing else.
"""

import hashlib
from pathlib import Path

from buffer_wire.weights.patch import apply_patch
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.weights.fetching.copy import take_file
from rollout_workers.weights.files import check_content


class EarlierVersions:
    """Directories of versions that this process has verified, the newest last, as long as they exist."""

    def __init__(self) -> None:
        self._directories: dict[str, tuple[Path, dict[str, bytes], frozenset[str]]] = {}
        """Directory of each label, the SHA-256 of its files by name, and the names of patches that it may have."""

    def note(self, label: str, directory: Path, manifest: weights_pb2.FilesManifest) -> None:
        """Note that a version is complete at `directory`; forget those whose directories are gone."""
        self._directories.pop(label, None)
        self._directories = {other: entry for other, entry in self._directories.items() if entry[0].is_dir()}
        patches = frozenset(patch.name for file in manifest.files for patch in file.patches)
        self._directories[label] = directory, {file.name: file.sha256 for file in manifest.files}, patches

    def find(self, label: str, name: str) -> Path | None:
        """A file of a version, or a patch of one that came; None when there is none."""
        if label not in self._directories:
            return None
        directory, files, patches = self._directories[label]
        path = directory / name
        return path if (name in files or name in patches) and path.is_file() else None

    def with_sha256(self, sha256: bytes) -> Path | None:
        """A file with this checksum; None when there is none."""
        for directory, files, _ in reversed(self._directories.values()):
            for name, found in files.items():
                if found == sha256 and (directory / name).is_file():
                    return directory / name
        return None

    def smallest(self, file: weights_pb2.WeightFile) -> weights_pb2.WeightPatch | None:
        """The smallest patch of a file whose base is here; None when there is none."""
        usable = [patch for patch in file.patches if self.with_sha256(patch.base_sha256) is not None]
        return min(usable, key=lambda patch: patch.size_bytes, default=None)

    def take_same(self, label: str, file: weights_pb2.WeightFile, target: Path) -> bool:
        """Link or copy a file that is here as it is, and check it. Blocking; False when it is gone or damaged."""
        same = self.with_sha256(file.sha256)
        if same is None:
            return False
        try:
            take_file(label, same, file, target)
        except (WeightsInvalid, WeightsUnavailable):
            return False
        return True

    def patch(
        self, label: str, file: weights_pb2.WeightFile, patch: weights_pb2.WeightPatch, source: Path, target: Path
    ) -> None:
        """Make `target` of the patch at `source`. Blocking. Raises WeightsInvalid, PatchInvalid, OSError."""
        base = self.with_sha256(patch.base_sha256)
        if base is None:
            raise FileNotFoundError(f"the base of {patch.name} is gone")
        state = hashlib.sha256()
        # A base that is removed meanwhile stays readable while it is open.
        with base.open("rb") as old, source.open("rb") as changes, target.open("xb") as new:

            def take(block: bytes) -> None:
                state.update(block)
                new.write(block)

            apply_patch(old, changes, take)
            size = new.tell()
        check_content(label, file, size, state.digest())
