"""Weights handed to the engines by value: for small models, and engines that see no disk of the trainer or worker.

The tensors travel as one safetensors file, as those of a files publisher do; what differs is that each worker reads it
and gives its engine the tensors themselves, for which the two have to be on one machine.
"""

from types import TracebackType
from typing import Self

from buffer_wire.errors import InvalidField
from trainer_client.manifest import FilesManifest, Manifest, TensorsManifest
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.named_tensors import named_tensors, size_of, specs_of
from trainer_client.publish.publication import Publication, WeightSource
from trainer_client.publish.saving import save_tensors

MAX_TENSOR_BYTES = 512 << 20
"""What workers accept of one version; a larger model is published as files or broadcast."""


class TensorsPublisher:
    """Publishes state dicts through `files`, which it closes with itself. Pass it to `BufferClient.session`."""

    def __init__(self, files: FilesPublisher) -> None:
        self._files = files

    def offer(self, source: WeightSource, publication: Publication) -> TensorsManifest:
        """Write a state dict, a module's, ShardedWeights, or what a function of names and tensors gives, called twice.

        Raises InvalidField for other sources, and above 512 MiB.
        """
        tensors = named_tensors(source)
        specs, _ = specs_of(tensors)
        total_bytes = sum(map(size_of, specs))
        if total_bytes > MAX_TENSOR_BYTES:
            limit = f"at most {MAX_TENSOR_BYTES >> 20} MiB to be handed over by value; use files or a collective update"
            raise InvalidField("source", f"{total_bytes / (1 << 20):.0f} MiB of tensors", limit)
        written = self._files.write(
            lambda directory: save_tensors(tensors, directory, specs=specs),
            epoch=publication.epoch,
            version=publication.version,
        )
        return TensorsManifest(written)

    def manifest_of(self, version: int) -> TensorsManifest:
        """The manifest of a version that is still on disk. Raises InvalidField that names the versions which are."""
        return TensorsManifest(self._files.manifest_of(version))

    def offer_again(self, version: int, publication: Publication) -> TensorsManifest:
        """An older version's tensors under the publication's version. Raises InvalidField if they are gone."""
        return TensorsManifest(self._files.offer_again(version, publication))

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """The service offers `manifest` now; older versions that nothing needs any more are removed."""
        if not isinstance(manifest, TensorsManifest | FilesManifest):
            return
        files = manifest.files if isinstance(manifest, TensorsManifest) else manifest
        self._files.published(files, committed_steps=committed_steps)

    def checkpointed(self, steps: int) -> None:
        """No resume goes back before step `steps` any more."""
        self._files.checkpointed(steps)

    def resumed(self, next_step: int) -> None:
        """Versions published after more than `next_step` steps are abandoned."""
        self._files.resumed(next_step)

    def close(self) -> None:
        """Close `files`."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
