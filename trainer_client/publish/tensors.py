"""Tensors publisher: hands weights to the engines by value, for small models and engines that see no shared disk.

The tensors travel as one safetensors file, like those of a files publisher. Each worker reads the file and gives its
engine the tensors themselves. For that the two have to be on one machine.
"""

from typing import Generic, Self, TypeVar

from buffer_wire.errors import InvalidField
from trainer_client.manifest import AdapterManifest, FilesManifest, Manifest, TensorsManifest
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.named_tensors import named_tensors, size_of, specs_of
from trainer_client.publish.publication import Publication, WeightSource
from trainer_client.publish.saving import save_tensors

M = TypeVar("M", TensorsManifest, AdapterManifest)

MAX_TENSOR_BYTES = 512 << 20
"""Limit, in bytes, that workers accept of one version; publish a larger model as files or by a broadcast."""


class OverFiles(Generic[M]):
    """Base of publishers whose manifests are those of `files`, under another name. It closes `files` with itself."""

    _kind: type[M]

    def __init__(self, files: FilesPublisher) -> None:
        self._files = files

    def manifest_of(self, version: int) -> M:
        """Make the manifest of a version that is still on disk. Raises InvalidField that names the versions on disk."""
        return self._kind(self._files.manifest_of(version))

    def offer_again(self, version: int, publication: Publication) -> M:
        """Offer an older version's files as the publication's version. Raises InvalidField if they are gone."""
        return self._kind(self._files.offer_again(version, publication))

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """Record that the service offers `manifest` now, and remove older versions that nothing needs any more."""
        files = manifest.files if isinstance(manifest, self._kind) else manifest
        if isinstance(files, FilesManifest):
            self._files.published(files, committed_steps=committed_steps)

    def checkpointed(self, steps: int) -> None:
        """Record that no resume goes back before step `steps` any more."""
        self._files.checkpointed(steps)

    def resumed(self, next_step: int) -> None:
        """Abandon versions published after more than `next_step` steps."""
        self._files.resumed(next_step)

    def close(self) -> None:
        """Close the files publisher `files`."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorsPublisher(OverFiles[TensorsManifest]):
    """Publisher of state dicts through `files`, which it closes with itself. Pass it to `BufferClient.session`."""

    _kind = TensorsManifest

    def offer(self, source: WeightSource, publication: Publication) -> TensorsManifest:
        """Write the tensors of a state dict, a module, ShardedWeights, or a function of names and tensors, called
        twice.

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
            term=publication.term,
            version=publication.version,
        )
        return TensorsManifest(written)
