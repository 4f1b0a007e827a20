"""The ways in which weights reach an engine, each as a publisher that a trainer session is given."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine_matrix.truth import tensors_of, write_version
from trainer_client.publish import CollectivePublisher, FilesPublisher, TensorsPublisher

KINDS = ("path", "http", "collective", "tensors")
HIDDEN = ("http", "collective", "tensors")
"""Kinds whose workers must not see the trainer's folder."""

_JOIN_S = 60.0
_BUCKET_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Way:
    """A publisher, and the weights of a version as it takes them."""

    publisher: Any
    source: Callable[[int], Any]


@contextlib.contextmanager
def way(kind: str, folder: Path, salt: int) -> Iterator[Way]:
    """The publisher of this kind, with its files below `folder`."""

    def files() -> FilesPublisher:
        return FilesPublisher(folder / "published", serve="path" if kind == "path" else "http")

    def directory_of(version: int) -> Callable[[Path], object]:
        return lambda directory: write_version(directory, version, salt)

    if kind in ("path", "http"):
        with files() as publisher:
            yield Way(publisher, directory_of)
    elif kind == "tensors":
        with TensorsPublisher(files()) as by_value:
            yield Way(by_value, partial(tensors_of, salt=salt))
    else:
        # Without files: every version has to arrive by the broadcast, in several buckets.
        with CollectivePublisher(timeout_s=_JOIN_S, bucket_bytes=_BUCKET_BYTES) as group:
            yield Way(group, partial(tensors_of, salt=salt))
