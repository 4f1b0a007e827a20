"""Files publisher: weights written beside, checksummed, renamed into place, offered by path or over http.

Invariants: a directory that bears its final name is complete and never changes. Its name holds a digest of its content,
so that writing the same weights again finds it. Files that a manifest names exist until no resume can go back to it
(`retention`). A killed process leaves nothing behind but a temporary directory, which the next one removes. One root
per run. Layout:

    root/v00000012-e2-0a1b2c3d4e5f/…    the files, and the patches that make them of older ones
    root/v00000012-e2-0a1b2c3d4e5f.json facts for retention and the server
    root/.port                          port on which they were served, if they were
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

from buffer_wire.errors import InvalidField
from buffer_wire.weights.door import WeightsDoor, digest_in
from trainer_client.manifest import FilesManifest, Manifest, WeightFile, WeightPatch, files_of
from trainer_client.publish.http import FileServer, ServedFile
from trainer_client.publish.patches import MAX_PATCHES, with_patches
from trainer_client.publish.publication import Publication, Save, WeightSource
from trainer_client.publish.retention import Kept, expendable
from trainer_client.publish.saving import save_tensors
from trainer_client.publish.sharded import ShardedWeights
from trainer_client.state import Published

if TYPE_CHECKING:
    from trainer_client.client.operations import ServiceClient

logger = logging.getLogger("trainer_client")

_TEMPORARY = ".writing-"
_PORT = ".port"
_MUCH_KEPT = 16


@dataclass(frozen=True, slots=True)
class _Record:
    """Record of a version, stored as the JSON file beside its directory."""

    term: int
    version: int
    order: int
    committed_steps: int | None
    files: tuple[tuple[str, int, str], ...]
    """Files, each with name, size in bytes, and SHA-256 in hexadecimal."""
    patches: tuple[tuple[str, str, int, str, str], ...] = ()
    """Patches, each with the name of its file, its own name, size, SHA-256, and that of the file it is applied to."""

    @classmethod
    def of(cls, term: int, version: int, order: int, files: Sequence[WeightFile]) -> Self:
        """The record of a version that is not published yet."""
        listed = tuple((file.name, file.size_bytes, file.sha256.hex()) for file in files)
        patches = tuple(
            (file.name, patch.name, patch.size_bytes, patch.sha256.hex(), patch.base_sha256.hex())
            for file in files
            for patch in file.patches
        )
        return cls(term, version, order, None, listed, patches)

    def listed(self) -> tuple[WeightFile, ...]:
        """Files of the manifest."""
        patches: dict[str, list[WeightPatch]] = {}
        for file, name, size, sha256, base in self.patches:
            patches.setdefault(file, []).append(WeightPatch(name, size, bytes.fromhex(sha256), bytes.fromhex(base)))
        return tuple(
            WeightFile(name, size, bytes.fromhex(sha256), tuple(patches.get(name, ())))
            for name, size, sha256 in self.files
        )

    def served(self) -> Iterator[tuple[str, int, str]]:
        """Names, sizes and SHA-256 of all that may be served."""
        yield from self.files
        yield from ((name, size, sha256) for _, name, size, sha256, _ in self.patches)


class FilesPublisher:
    """Publisher of directories below `root`. Pass it to `BufferClient.session`; close it after the run.

    `keep`: number of newest versions that stay in any case. `serve`: "path" offers absolute paths, for engines that see
    the same disk; "http" serves the files from this process. `host`: address to listen on, loopback by default.
    `advertised_host`: address that engines connect to, default `host`. `port` 0: the one that this root had before, so
    that versions published before a restart are found, or any free one. Name a fixed port if the trainer may move.

    Of "http" alone: `door` is the token that readers need and the certificate, by default those of the environment;
    without a token, all who reach the port may read. `mirrors`: base URLs of relays, which workers ask first.
    `patches`: number of newest versions, at most 4, of which a new one is made by patches as well as whole. A worker
    that has one of them fetches only what differs; each costs the publish a pass over both versions.
    """

    def __init__(  # noqa: PLR0913 - options of one mechanism
        self,
        root: Path | str,
        *,
        keep: int = 3,
        serve: Literal["path", "http"] = "path",
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        door: WeightsDoor | None = None,
        mirrors: Sequence[str] = (),
        patches: int = 0,
    ) -> None:
        if keep < 1:
            raise InvalidField("keep", keep, "at least 1")
        if serve not in ("path", "http"):
            raise InvalidField("serve", serve, "'path' or 'http'")
        most_patches = min(keep, MAX_PATCHES) if serve == "http" else 0
        if not 0 <= patches <= most_patches:
            raise InvalidField("patches", patches, f"0 to {most_patches}, with serve={serve!r} and keep={keep}")
        self._patches = patches
        self.root = Path(root).resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._checkpointed_steps = 0
        self._much = max(_MUCH_KEPT, keep)
        """Number of versions on disk above which a warning is logged; after a warning, twice the number on disk."""
        for left_behind in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left_behind)
        self._records = _read_records(self.root)
        self._order = max((record.order for record in self._records.values()), default=0)
        self._mirrors = tuple(mirrors)
        self._server: FileServer | None = None
        self._base_url = str(self.root)
        if serve == "http":
            door = door or WeightsDoor()
            self._server = self._listen(host, port, door)
            self._base_url = f"{door.scheme}://{advertised_host or host}:{self._server.port}"

    def _listen(self, host: str, port: int, door: WeightsDoor) -> FileServer:
        """Listen on the port that manifests of earlier processes name, unless another was asked for or it is taken."""
        remembered = self.root / _PORT
        if port == 0 and remembered.is_file():
            try:
                return FileServer(self._served, host=host, port=int(remembered.read_text()), door=door)
            except (OSError, ValueError, OverflowError) as error:
                logger.warning(
                    "the port that served %s before cannot be had (%s): weights published from there are not found "
                    "until the next publish",
                    self.root,
                    error,
                )
        server = FileServer(self._served, host=host, port=port, door=door)
        remembered.write_text(f"{server.port}\n")
        return server

    @property
    def versions(self) -> list[int]:
        """Versions on disk, in the order of their publishing."""
        return [record.version for record in sorted(self._records.values(), key=lambda record: record.order)]

    def close(self) -> None:
        """Stop serving; the files stay."""
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, source: WeightSource, publication: Publication) -> FilesManifest:
        """Write weights for a publication, as `write` does.

        Raises InvalidField for a source other than a directory, function or ShardedWeights.
        """
        if isinstance(source, ShardedWeights):
            save: Path | str | Save = partial(save_tensors, source)
        elif isinstance(source, Path | str) or (callable(source) and not hasattr(source, "state_dict")):
            save = cast("Path | str | Save", source)
        else:
            others = "tensors are for TensorsPublisher, CollectivePublisher"
            raise InvalidField(
                "source", type(source).__name__, f"a directory or a function that writes into one; {others}"
            )
        return self.write(save, term=publication.term, version=publication.version)

    def manifest_of(self, version: int) -> FilesManifest:
        """Make the manifest of a version that is still on disk, the newest if it was published in several terms.

        Raises InvalidField that names the versions on disk.
        """
        found = [entry for entry in self._records.items() if entry[1].version == version]
        if not found:
            on_disk = ", ".join(map(str, sorted(set(self.versions)))) or "none"
            raise InvalidField("version", version, f"one whose files are still in {self.root}: {on_disk}")
        name, record = max(found, key=lambda entry: entry[1].order)
        files = record.listed()
        for file in files:
            if not (self.root / name / file.name).is_file():
                raise InvalidField(
                    "version", version, f"one whose files are whole: {self.root / name / file.name} is gone"
                )
        return FilesManifest(f"{self._base_url}/{name}", files, self._mirrors)

    def offer_again(self, version: int, publication: Publication) -> FilesManifest:
        """Offer an older version's files as the publication's version. They are linked, so that each version can be
        removed on its own.
        """
        manifest = self.manifest_of(version)
        kept = self.root / manifest.base_url.rpartition("/")[2]

        def link(directory: Path) -> None:
            for file in manifest.files:
                (directory / file.name).parent.mkdir(parents=True, exist_ok=True)
                os.link(kept / file.name, directory / file.name)

        return self.write(link, term=publication.term, version=publication.version)

    def write(self, source: Path | str | Save, *, term: int, version: int) -> FilesManifest:
        """Put weights in place and return their manifest.

        `source`: a directory, which is copied, or a function that writes files into the empty directory it is given,
        such as `model.save_pretrained`. Raises InvalidField when there are no files.
        """
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
        try:
            if callable(source):
                source(temporary)
            else:
                _copy(Path(source), temporary)
            files = files_of(temporary)
            name = f"v{version:08d}-e{term}-{_digest(files)}"
            if name not in self._records:
                files = with_patches(temporary, files, self._newest(self._patches))
                # Of a write that failed after it was put there, or was killed: nobody was told of it.
                shutil.rmtree(self.root / name, ignore_errors=True)
                temporary.chmod(0o755)
                temporary.rename(self.root / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if name not in self._records:
            self._order += 1
            self._save(name, _Record.of(term, version, self._order, files))
        return FilesManifest(f"{self._base_url}/{name}", self._records[name].listed(), self._mirrors)

    def _newest(self, count: int) -> list[tuple[Path, dict[str, str]]]:
        """The `count` newest versions: directories, and the SHA-256 of their files by name."""
        newest = sorted(self._records.items(), key=lambda entry: -entry[1].order)[:count]
        return [(self.root / name, {path: sha256 for path, _, sha256 in record.files}) for name, record in newest]

    def publish(
        self,
        client: "ServiceClient",
        run_id: str,
        source: Path | str | Save,
        *,
        term: int,
        version: int,
        commit_through: int | None = None,
    ) -> Published:
        """Write, publish and tidy up, for trainers without a session. Raises what `BufferClient.publish` raises."""
        manifest = self.write(source, term=term, version=version)
        done = client.publish(run_id, term=term, version=version, manifest=manifest, commit_through=commit_through)
        self.published(manifest, committed_steps=done.committed_steps)
        return done

    def published(self, manifest: Manifest, *, committed_steps: int) -> None:
        """Record that the service offers `manifest` now, and remove older versions that nothing needs any more."""
        name = manifest.base_url.rpartition("/")[2] if isinstance(manifest, FilesManifest) else ""
        record = self._records.get(name)
        if record is not None:
            self._save(name, replace(record, committed_steps=committed_steps))
        self._remove_expendable()

    def checkpointed(self, steps: int) -> None:
        """Record that no resume goes back before step `steps`, and remove versions that only such a resume needs."""
        self._checkpointed_steps = max(self._checkpointed_steps, steps)
        self._remove_expendable()

    def resumed(self, next_step: int) -> None:
        """Abandon versions published after more than `next_step` steps: no resume offers them again."""
        for name, record in list(self._records.items()):
            if record.committed_steps is not None and record.committed_steps > next_step:
                self._save(name, replace(record, committed_steps=None))

    def _save(self, name: str, record: _Record) -> None:
        sidecar = self.root / f"{name}.json"
        temporary = sidecar.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(sidecar)
        self._records[name] = record

    def _remove_expendable(self) -> None:
        kept = [Kept(name, record.order, record.committed_steps) for name, record in self._records.items()]
        for entry in expendable(kept, keep=self._keep, checkpointed_steps=self._checkpointed_steps):
            # First nobody is told of it any more, then it goes; readers that have it open keep it.
            del self._records[entry.name]
            (self.root / f"{entry.name}.json").unlink(missing_ok=True)
            shutil.rmtree(self.root / entry.name)
        if len(self._records) > self._much:
            self._much = 2 * len(self._records)
            logger.warning(
                "%d versions lie in %s, because a resume could go back to them: checkpoint the session to let them go",
                len(self._records),
                self.root,
            )

    def _served(self, path: str) -> ServedFile | None:
        """Find the file of a url path "name/file" or "sha256/DIGEST"; None for one that no live manifest names."""
        digest = digest_in(path)
        if digest is not None:
            for name, record in reversed([*self._records.items()]):
                for listed, size_bytes, sha256 in record.served():
                    if sha256 == digest:
                        return ServedFile(self.root / name / listed, size_bytes, sha256)
            return None
        name, _, file_name = path.partition("/")
        found = self._records.get(name)
        for listed, size_bytes, sha256 in found.served() if found is not None else ():
            if listed == file_name:
                return ServedFile(self.root / name / listed, size_bytes, sha256)
        return None


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise InvalidField("source", str(source), "an existing directory")
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)


def _digest(files: tuple[WeightFile, ...]) -> str:
    lines = "".join(f"{file.name}\0{file.size_bytes}\0{file.sha256.hex()}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _read_records(root: Path) -> dict[str, _Record]:
    """Read the records that an earlier process left. A directory without a record was never offered and is removed."""
    records = {}
    for directory in (path for path in root.glob("v*-e*") if path.is_dir()):
        sidecar = root / f"{directory.name}.json"
        if not sidecar.is_file():
            shutil.rmtree(directory)
            continue
        stored = json.loads(sidecar.read_text())
        for listed in ("files", "patches"):
            stored[listed] = tuple(map(tuple, stored.get(listed, ())))
        records[directory.name] = _Record(**stored)
    for sidecar in root.glob("v*-e*.json"):
        if sidecar.stem not in records:
            sidecar.unlink()
    return records
