"""Puts the files of a version on the local disk, whole and verified, or not at all.

Files arrive under a temporary directory; after the last checksum it is renamed to its place. So a directory that exists
is complete, a wrong file replaces nothing, and a crash leaves only what the next start sweeps. The place's name holds
the manifest's digest: a version of another content never meets it. Several workers may share the root: one of them
brings a version for all, and what any of them loads or uses is pinned.

Mirrors are asked before the publisher. One that fails is no end: peers of the run that have the version are asked too.
What the versions that are here give is not fetched: files that are the same, and bases that a patch changes.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from buffer_wire.weights.patch import PatchInvalid
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.copy import take_file
from rollout_workers.weights.fetching.earlier import EarlierVersions
from rollout_workers.weights.fetching.peers import NoPeers, Peers
from rollout_workers.weights.fetching.pins import Pin, remove_unpinned
from rollout_workers.weights.fetching.turn import LOCK, there, turn
from rollout_workers.weights.files import check_manifest, digest, source_directory
from rollout_workers.weights.transfer.client import WeightClient
from rollout_workers.weights.transfer.download import Download
from rollout_workers.weights.transfer.rates import origin
from rollout_workers.weights.transfer.sources import Sources

_ABANDONED_S = 3_600.0
_PATIENCE = 0.5
"""Share of the time that is left for which another worker, or a patch, is waited for: the rest does without it."""
_PARTIAL = ".part-"
MOST_SAID = 512
"""Most characters that are said of where a version came from."""
_log = structlog.get_logger()


class WeightFetcher:
    """Fetches into `root`, one version at a time; used by all loaders of a worker."""

    def __init__(
        self,
        root: Path,
        *,
        owner: str,
        keep: int,
        client: WeightClient | None = None,
        mirrors: Sequence[str] = (),
        peers: Peers | None = None,
        prefer_peers: bool = False,
    ) -> None:
        self._root = root.absolute()
        self._owner = owner
        self._keep = keep
        self._client = client or WeightClient()
        self._mirrors = mirrors
        self._peers = peers or NoPeers()
        self._prefer_peers = prefer_peers
        self._lock = asyncio.Lock()
        self.came_from = ""
        """Source of the files of the version that was brought last, and why that one, in words."""
        self._in_use: dict[str, Pin] = {}
        """Pinned directories that engines use, by engine_id."""
        self._fetched: dict[str, Pin] = {}
        """Pinned directories that were fetched for engines that have not loaded them yet, by engine_id."""
        self._earlier = EarlierVersions()

    async def fetch(
        self,
        version: Version,
        manifest: weights_pb2.FilesManifest,
        *,
        deadline_s: float,
        engine_id: str | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Path:
        """Directory with the verified files of `version`; kept for an engine until it holds or fetches another one.

        Raises WeightsInvalid (the source's content is wrong), WeightsUnavailable (not to be had within `deadline_s`, or
        from nobody now, and not `wanted` any more).
        """
        deadline_at = time.monotonic() + deadline_s
        label = version.label
        check_manifest(label, manifest)
        directory = self._root / f"{label}-{digest(manifest)}"
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                while (pin := Pin.at(directory)) is None:
                    await self._bring_once(version, manifest, directory, deadline_at, wanted)
                pin.touch()
                if engine_id is None:
                    pin.release()
                else:
                    _exchange(self._fetched, engine_id, pin)
                self._earlier.note(label, directory, manifest)
        except TimeoutError:
            raise WeightsUnavailable(label, manifest.base_url, f"not complete within {deadline_s:g} s") from None
        except OSError as error:
            raise WeightsUnavailable(label, str(self._root), error.strerror or str(error)) from error
        return directory

    def hold(self, engine_id: str, directory: Path) -> None:
        """Note that an engine uses a directory now, in place of the one before; then drop what is too old."""
        _exchange(self._in_use, engine_id, Pin.at(directory))
        _exchange(self._fetched, engine_id, None)
        self._retain()

    def release(self, engine_id: str) -> None:
        """Keep nothing for an engine that has left."""
        _exchange(self._in_use, engine_id, None)
        _exchange(self._fetched, engine_id, None)
        self._retain()

    def find(self, label: str, name: str) -> Path | None:
        """A file of a complete version, or a patch of it; None when there is no such version or file."""
        return self._earlier.find(label, name)

    async def close(self) -> None:
        """Close connections; nothing is kept for any engine any more."""
        for pins in (self._in_use, self._fetched):
            for engine_id in list(pins):
                _exchange(pins, engine_id, None)
        await self._client.close()

    def sweep(self) -> None:
        """Remove what fetches of this owner, or of anybody an hour ago, left unfinished."""
        for path in self._root.glob(f".*{LOCK}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
        for path in self._root.glob(f".*{_PARTIAL}*"):
            with contextlib.suppress(OSError):
                mine = path.name.endswith(f"{_PARTIAL}{self._owner}")
                if mine or time.time() - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)

    async def _bring_once(
        self,
        version: Version,
        manifest: weights_pb2.FilesManifest,
        directory: Path,
        deadline_at: float,
        wanted: Callable[[], bool],
    ) -> None:
        """Bring a version, unless another worker that shares the root does so in time."""
        self._root.mkdir(parents=True, exist_ok=True)
        async with turn(directory, wait_s=(deadline_at - time.monotonic()) * _PATIENCE):
            if not there(directory):
                await self._bring(version, manifest, directory, deadline_at, wanted)

    async def _bring(
        self,
        version: Version,
        manifest: weights_pb2.FilesManifest,
        directory: Path,
        deadline_at: float,
        wanted: Callable[[], bool],
    ) -> None:
        label = version.label
        partial = self._root / f".{directory.name}{_PARTIAL}{self._owner}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            source = source_directory(label, manifest.base_url)
            mirrors = list(dict.fromkeys((*self._mirrors, *manifest.mirrors)))
            came: Counter[str] = Counter()
            spared = 0
            began = time.monotonic()

            async def download(file: weights_pb2.WeightFile, until: float) -> None:
                sources = Sources(
                    file.name,
                    file.sha256,
                    manifest.base_url if source is None else None,
                    lambda: self._peers.with_version(version),
                    rates=self._client.rates,
                    mirrors=mirrors,
                    prefer_peers=self._prefer_peers,
                )
                run = Download(label, sources, file, partial / file.name, self._client)
                await run.run(until, wanted=wanted)
                for url, size in run.received.items():
                    came[origin(url)] += size

            for file in manifest.files:
                target = partial / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                if source is not None and await self._taken(version, source, file, target):
                    continue
                if await asyncio.to_thread(self._earlier.take_same, label, file, target):
                    spared += file.size_bytes
                elif (patched := await self._patched(label, file, partial, download, deadline_at)) is not None:
                    spared += file.size_bytes - patched
                else:
                    await download(file, deadline_at)
            self._note(label, mirrors, came, spared, time.monotonic() - began)
            with contextlib.suppress(FileExistsError):
                # Another worker of this host may have been faster: its directory is as good.
                self._rename(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    async def _patched(
        self,
        label: str,
        file: weights_pb2.WeightFile,
        partial: Path,
        download: Callable[[weights_pb2.WeightFile, float], Awaitable[None]],
        deadline_at: float,
    ) -> int | None:
        """Make a file of a patch and of what is here; returns the patch's size, None where that cannot be done."""
        patch = self._earlier.smallest(file)
        if patch is None:
            return None
        whole = weights_pb2.WeightFile(name=patch.name, size_bytes=patch.size_bytes, sha256=patch.sha256)
        left_s = deadline_at - time.monotonic()
        try:
            await download(whole, deadline_at - left_s * _PATIENCE)
            paths = partial / patch.name, partial / file.name
            await asyncio.to_thread(self._earlier.patch, label, file, patch, *paths)
        except (WeightsUnavailable, WeightsInvalid, PatchInvalid, OSError) as error:
            _log.warning(
                "a patch cannot be used; the file is fetched", file=file.name, patch=patch.name, why=str(error)
            )
            for path in (partial / patch.name, partial / file.name):
                path.unlink(missing_ok=True)
            return None
        return patch.size_bytes

    async def _taken(self, version: Version, source: Path, file: weights_pb2.WeightFile, target: Path) -> bool:
        """Take a file from a directory; False when it is not there and peers have the version."""
        try:
            await asyncio.to_thread(take_file, version.label, source / file.name, file, target)
        except WeightsUnavailable:
            if not await self._peers.with_version(version):
                raise
            return False
        return True

    @staticmethod
    def _rename(partial: Path, directory: Path) -> None:
        try:
            os.rename(partial, directory)  # noqa: PTH104 - raises for a directory that is not empty, and says which
        except OSError:
            if not directory.is_dir():
                raise
            raise FileExistsError(str(directory)) from None

    def _note(self, label: str, mirrors: Sequence[str], came: Counter[str], spared: int, seconds: float) -> None:
        """Log where a version came from, why from there, and what was `spared` of its bytes."""
        if not came and not spared:
            return
        shares = ", ".join(f"{url} {size / 1e6:.1f} MB" for url, size in came.most_common()) or "what was here"
        rate = f"{came.total() / 1e6 / max(seconds, 1e-6):.1f} MB/s"
        why = {"mirrors": self._client.rates.describe(mirrors)} if mirrors else {}
        if spared:
            why["spared"] = f"{spared / 1e6:.1f} MB were made of earlier versions"
        _log.info("weights fetched", version=label, came_from=shares, rate=rate, **why)
        self.came_from = f"{shares} at {rate}" + (f" ({'; '.join(why.values())})" if why else "")
        self.came_from = self.came_from[:MOST_SAID]

    def _retain(self) -> None:
        held = {pin.directory for pins in (self._in_use, self._fetched) for pin in pins.values()}
        others: list[tuple[int, Version, Path]] = []
        for path in self._root.iterdir() if self._root.is_dir() else ():
            version = Version.parse(path.name.rpartition("-")[0])
            with contextlib.suppress(OSError):  # Another worker may remove it.
                if version is not None:
                    # When it was asked for counts first: an earlier run of this name may have left higher versions.
                    others.append((path.stat().st_mtime_ns, version, path))
        others.sort(reverse=True)
        for *_, path in others[self._keep :]:
            if path not in held:
                remove_unpinned(path, self._root / f".{path.name}-removed{_PARTIAL}{self._owner}")


def _exchange(pins: dict[str, Pin], engine_id: str, pin: Pin | None) -> None:
    """Put a pin in the place of the engine's former one."""
    former = pins.pop(engine_id, None)
    if pin is not None:
        pins[engine_id] = pin
    if former is not None:
        former.release()
