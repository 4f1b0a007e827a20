"""The ways in which weights reach an engine, each as a publisher that a trainer session is given."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine_matrix.truth import write_version
from trainer_client.publish import FilesPublisher

KINDS = ("path", "http", "collective", "tensors")
HIDDEN = ("http", "tensors")
"""Kinds whose workers must not see the trainer's folder."""

Source = Callable[[int], Any]
"""The weights of a version, as the publisher takes them."""


@dataclass(frozen=True, slots=True)
class Way:
    """A publisher, and what it is given."""

    publisher: Any
    source: Source


def directory_of(version: int) -> Callable[[Path], object]:
    """Writes a version into the directory that it is given, as `model.save_pretrained` does."""
    return lambda directory: write_version(directory, version)


@contextlib.contextmanager
def way(kind: str, folder: Path) -> Iterator[Way]:
    """The publisher of this kind, with its files below `folder`."""
    if kind in ("path", "http"):
        with FilesPublisher(folder / "published", serve=kind) as publisher:  # type: ignore[arg-type]
            yield Way(publisher, directory_of)
    else:
        raise NotImplementedError(kind)
