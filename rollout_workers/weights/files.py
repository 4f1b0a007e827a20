"""A files manifest checked, and files checked against it.

Names come from the network and become paths: nothing outside the version's own directory can be named.
"""

import hashlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from buffer_wire.limits import CONTROL, MAX_PATCHES, MAX_WEIGHT_FILE_BYTES, directory_among, is_file_name, is_http_url
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid

MAX_FILES = 4_096
CHUNK_BYTES = 4 << 20
_HTTP = "http(s)://HOST, with a port from 1 to 65535 if any"

Named: TypeAlias = weights_pb2.WeightFile | weights_pb2.WeightPatch


def check_manifest(label: str, manifest: weights_pb2.FilesManifest) -> None:
    """Raise WeightsInvalid for a manifest that cannot be fetched safely."""
    if not 1 <= len(manifest.files) <= MAX_FILES:
        raise WeightsInvalid(label, "manifest", f"{len(manifest.files)} files; it must be 1 to {MAX_FILES}")
    if CONTROL.search(manifest.base_url):
        raise WeightsInvalid(label, repr(manifest.base_url), "base_url has a control character")
    for url in manifest.mirrors:
        if not is_http_url(url):
            raise WeightsInvalid(label, repr(url), f"the mirror must be {_HTTP}")
    seen: set[str] = set()
    for file in manifest.files:
        if len(file.patches) > MAX_PATCHES:
            raise WeightsInvalid(
                label, file.name, f"it has {len(file.patches)} patches; at most {MAX_PATCHES} are read"
            )
        of_file: tuple[Named, ...] = (file, *file.patches)
        for named in of_file:
            _check_named(label, named)
            if named.name in seen:
                raise WeightsInvalid(label, named.name, "named twice")
            seen.add(named.name)
    if clash := directory_among(seen):
        raise WeightsInvalid(label, clash, "another file lies below this one")


def _check_named(label: str, named: Named) -> None:
    if not is_file_name(named.name):
        raise WeightsInvalid(label, repr(named.name), "the name must be a relative path without '..'")
    if named.size_bytes > MAX_WEIGHT_FILE_BYTES:
        why = f"size_bytes is {named.size_bytes}; it must be at most {MAX_WEIGHT_FILE_BYTES}"
        raise WeightsInvalid(label, named.name, why)
    if len(named.sha256) != 32:
        raise WeightsInvalid(label, named.name, f"sha256 has {len(named.sha256)} bytes; it must be 32")


def source_directory(label: str, base_url: str) -> Path | None:
    """The directory that a path or file:// URL names; None for http and https."""
    if base_url.lower().startswith(("http:", "https:")):
        if not is_http_url(base_url):
            raise WeightsInvalid(label, repr(base_url), f"base_url must be {_HTTP}")
        return None
    try:
        url = urlsplit(base_url)
    except ValueError as error:
        raise WeightsInvalid(label, repr(base_url), f"base_url is no URL: {error}") from None
    path = Path(unquote(url.path)) if url.scheme == "file" and url.netloc in ("", "localhost") else Path(base_url)
    if not path.is_absolute():
        raise WeightsInvalid(label, base_url, "base_url must be file:///…, an absolute path, or http(s)://…")
    return path


def digest(manifest: weights_pb2.FilesManifest) -> str:
    """Identity of the content, wherever it comes from: 12 hex digits."""
    state = hashlib.sha256()
    for file in sorted(manifest.files, key=lambda file: file.name):
        state.update(f"{file.name}\0{file.size_bytes}\0".encode() + file.sha256)
    return state.hexdigest()[:12]


def hash_into(path: Path, state: "hashlib._Hash", take: Callable[[bytes], object] = lambda _: None) -> int:
    """Feed a file to the hash and to `take`; returns its size in bytes. Blocking."""
    size = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            state.update(chunk)
            take(chunk)
            size += len(chunk)
    return size


def check_source(label: str, file: weights_pb2.WeightFile, path: Path) -> None:
    """Raise WeightsInvalid where there is no file of the right size at `path`; OSError where there is nothing.

    Before it is read: a device or a pipe may have no end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise WeightsInvalid(label, file.name, f"{path} is no regular file")
    check_size(label, file, found.st_size)


def check_size(label: str, file: weights_pb2.WeightFile, size_bytes: int) -> None:
    """Raise WeightsInvalid, naming the file, when its size is not the manifest's."""
    if size_bytes != file.size_bytes:
        raise WeightsInvalid(label, file.name, f"it has {size_bytes} bytes, the manifest says {file.size_bytes}")


def check_content(label: str, file: weights_pb2.WeightFile, size_bytes: int, sha256: bytes) -> None:
    """Raise WeightsInvalid, naming the file, when size or checksum is not the manifest's."""
    check_size(label, file, size_bytes)
    if sha256 != file.sha256:
        raise WeightsInvalid(
            label, file.name, f"its SHA-256 is {sha256.hex()[:16]}…, the manifest says {file.sha256.hex()[:16]}…"
        )
