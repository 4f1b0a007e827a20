"""Images of prompts: references are resolved once, kept on disk by their SHA-256, and placed in the prompt's tokens.

Invariants: what lies under a SHA-256 has it, and passed the bounds of buffer_wire.images. Whoever asks for what is
being read waits for that. One location has the same image for as long as it is among the last MOST_LOCATIONS.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from buffer_wire.errors import UnknownBlob
from buffer_wire.images.reading import ImageRefused, ImageRules, ImageUnavailable, check_image, read_location
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.types import PromptImage
from rollout_workers.errors import PromptRefused
from rollout_workers.generation.sample import TokenIds

MOST_BYTES = 4 << 30
"""Bytes of images on disk above which those go that nobody has used for IDLE_S."""

IDLE_S = 3_600.0

MOST_LOCATIONS = 100_000
"""Locations whose SHA-256 is remembered; the one that was read first is forgotten first."""

MOST_PROMPT_BYTES = 64 << 20
"""Most bytes of the images of one prompt, encoded."""

ReadBlob: TypeAlias = Callable[[str], Awaitable[bytes]]
"""Reader of a blob of the run, by its SHA-256. Raises UnknownBlob."""


def references_of(task: tasks_pb2.Task) -> list[groups_pb2.ImageRef]:
    """The images of a task, in the order of its prompt."""
    told = [part.image for message in task.messages for part in message.parts if part.HasField("image")]
    return [*task.images, *told]


class Images:
    """Images of one run on disk, in `directory`. Workers may share it."""

    def __init__(self, directory: Path, read_blob: ReadBlob, rules: ImageRules) -> None:
        self._directory = directory
        self._read_blob = read_blob
        self._rules = rules
        self._known: dict[str, str] = {}
        """SHA-256 by location."""
        self._reading: dict[str, asyncio.Task[str]] = {}
        self._written = MOST_BYTES
        """Bytes written since the last look at what lies there; at first nobody knows what does."""

    async def resolve(self, task_id: str, references: Sequence[groups_pb2.ImageRef]) -> list[PromptImage]:
        """The images that these name, read once each. Raises PromptRefused."""
        try:
            found, size = await self._found(references)
        except (ImageRefused, ImageUnavailable, UnknownBlob) as error:
            raise PromptRefused(task_id, str(error)) from error
        if size > MOST_PROMPT_BYTES:
            raise PromptRefused(task_id, f"its images have {size} bytes, and {MOST_PROMPT_BYTES} are allowed together")
        return [
            PromptImage(digest, one.location, self._path(digest), one.start, one.tokens)
            for digest, one in zip(found, references, strict=True)
        ]

    async def _found(self, references: Sequence[groups_pb2.ImageRef]) -> tuple[list[str], int]:
        """The SHA-256 of each, and the bytes of all."""
        found = await asyncio.gather(*map(self._resolve, references))
        with contextlib.suppress(FileNotFoundError):  # Another worker made room by what was idle until now.
            return found, await asyncio.to_thread(self._size, found)
        found = await asyncio.gather(*map(self._resolve, references))
        return found, await asyncio.to_thread(self._size, found)

    def _size(self, digests: Sequence[str]) -> int:
        return sum(self._path(digest).stat().st_size for digest in digests)

    def _path(self, digest: str) -> Path:
        return self._directory / digest

    async def _resolve(self, reference: groups_pb2.ImageRef) -> str:
        """SHA-256 of the image, which lies on disk then."""
        digest = reference.sha256 or self._known.get(reference.location, "")
        if digest:
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(os.utime, self._path(digest))
                return digest
        key = digest or reference.location
        if key not in self._reading:
            self._reading[key] = reading = asyncio.create_task(self._read(reference))
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        # Others may wait for it too: a cancelled lease ends its own wait alone.
        return await asyncio.shield(self._reading[key])

    async def _read(self, reference: groups_pb2.ImageRef) -> str:
        if reference.location:
            data = await asyncio.to_thread(read_location, reference.location, self._rules)
        else:
            data = await self._read_blob(reference.sha256)
        what = reference.location or reference.sha256
        digest = await asyncio.to_thread(self._keep, data, what, reference.sha256)
        if reference.location:
            if len(self._known) >= MOST_LOCATIONS:
                del self._known[next(iter(self._known))]
            self._known[reference.location] = digest
        return digest

    def _keep(self, data: bytes, what: str, expected: str) -> str:
        digest = check_image(data, what, expected)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._make_room(len(data))
        new = self._directory / f".{digest}.{os.getpid()}.{time.monotonic_ns()}"
        new.write_bytes(data)
        new.replace(self._path(digest))
        return digest

    def _make_room(self, size: int) -> None:
        """Delete what was not used for long, once enough was written to be worth a look."""
        self._written += size
        if self._written < MOST_BYTES // 8:
            return
        self._written, now = 0, time.time()
        kept = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # Others write and delete here, too.
                stat = path.stat()
                kept.append((stat.st_mtime, stat.st_size, path))
        kept.sort()
        total = sum(its for _, its, _ in kept)
        for used, its, path in kept:
            if total <= MOST_BYTES or used > now - IDLE_S:
                return
            path.unlink(missing_ok=True)
            total -= its


def expanded(
    task_id: str, ids: TokenIds, placeholder: int, counts: Sequence[int], images: Sequence[PromptImage]
) -> tuple[TokenIds, list[PromptImage]]:
    """A prompt with one placeholder for each image, int32 [p], as the model sees it: `counts` placeholders for each.

    Returns the token ids and the images in their places. Raises PromptRefused.
    """
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(images):
        raise PromptRefused(task_id, f"the chat template wrote {len(places)} placeholders for {len(images)} images")
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = counts
    starts = np.cumsum(repeats)[places] - repeats[places]
    placed = [
        replace(image, start=int(start), tokens=count)
        for image, start, count in zip(images, starts, counts, strict=True)
    ]
    return np.repeat(ids, repeats), placed
