"""Weights under the step that made them: OUTPUT/weights/step_N beside what engines fetch.

Engines fetch the immutable directories of FilesPublisher. `step_N` holds the same files by hard link, with an empty
file STABLE, written last, as PRIME-RL's readers expect it; a step that is published again after a resume replaces it.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from buffer_wire.errors import InvalidField
from trainer_client.manifest import FilesManifest, Manifest
from trainer_client.publication import Publication, WeightSource
from trainer_client.publish.files import FilesPublisher

STABLE = "STABLE"
_WRITING = ".writing-"


class StepPublisher(FilesPublisher):
    """FilesPublisher that also tags by step. `output_dir`: its versions lie in `broadcasts`, the tags in `weights`.

    `interval_to_keep`: steps that are multiples of it stay for good; others go with their version (`keep`, resumes).
    Further options are those of FilesPublisher.
    """

    def __init__(self, output_dir: Path | str, *, interval_to_keep: int | None = None, **options: Any) -> None:  # noqa: ANN401
        if interval_to_keep is not None and interval_to_keep < 1:
            raise InvalidField("interval_to_keep", interval_to_keep, "at least 1, or None")
        super().__init__(Path(output_dir) / "broadcasts", **options)
        self.weights_dir = self.root.parent / "weights"
        self.weights_dir.mkdir(exist_ok=True)
        for left_behind in self.weights_dir.glob(f"{_WRITING}*"):
            shutil.rmtree(left_behind)
        self._interval_to_keep = interval_to_keep
        self._offered: tuple[str, int] | None = None
        """Directory name and version of the latest offer."""

    @property
    def steps(self) -> list[int]:
        """Steps that are tagged, in order."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.weights_dir.glob("step_*"))

    def offer(self, source: WeightSource, publication: Publication) -> FilesManifest:
        """See FilesPublisher."""
        manifest = super().offer(source, publication)
        self._offered = (_directory(manifest), publication.version)
        return manifest

    def offer_again(self, version: int, publication: Publication) -> FilesManifest:
        """See FilesPublisher."""
        manifest = super().offer_again(version, publication)
        self._offered = (_directory(manifest), publication.version)
        return manifest

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """Tag what was offered, and tidy up."""
        if self._offered is not None and isinstance(manifest, FilesManifest):
            name, step = self._offered
            if name == _directory(manifest):
                self._tag(manifest, step)
        super().published(manifest, committed_steps=committed_steps)
        self._untag()

    def checkpointed(self, steps: int) -> None:
        """See FilesPublisher."""
        super().checkpointed(steps)
        self._untag()

    def _tag(self, manifest: FilesManifest, step: int) -> None:
        kept = self.root / _directory(manifest)
        writing = self.weights_dir / f"{_WRITING}{step}"
        shutil.rmtree(writing, ignore_errors=True)
        for file in manifest.files:
            (writing / file.name).parent.mkdir(parents=True, exist_ok=True)
            os.link(kept / file.name, writing / file.name)
        tag = self.weights_dir / f"step_{step}"
        if tag.exists():
            # First it is not stable any more, then it goes: no reader takes half of it for a whole.
            (tag / STABLE).unlink(missing_ok=True)
            shutil.rmtree(tag)
        writing.rename(tag)
        (tag / STABLE).touch()

    def _untag(self) -> None:
        versions = set(self.versions)
        for step in self.steps:
            kept = self._interval_to_keep is not None and step % self._interval_to_keep == 0
            if step not in versions and not kept:
                (self.weights_dir / f"step_{step}" / STABLE).unlink(missing_ok=True)
                shutil.rmtree(self.weights_dir / f"step_{step}")


def _directory(manifest: FilesManifest) -> str:
    return manifest.base_url.rpartition("/")[2]
