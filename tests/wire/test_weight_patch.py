"""Patches of weights files: what was patched is the newer file, and what is no patch is refused."""

import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_wire.weights import patch as format_
from buffer_wire.weights.patch import PatchInvalid, apply_patch, write_patch

BLOCK = 1 << 12
UNBOUNDED = 1 << 30


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_, "BLOCK_BYTES", BLOCK)


def made(directory: Path, old: bytes, new: bytes, max_bytes: int = UNBOUNDED) -> bytes | None:
    """The patch from one file to the other."""
    base, target, patch = directory / "old", directory / "new", directory / "patch"
    base.write_bytes(old)
    target.write_bytes(new)
    patch.unlink(missing_ok=True)
    return patch.read_bytes() if write_patch(base, target, patch, max_bytes=max_bytes) else None


def applied(directory: Path, old: bytes, patch: bytes) -> bytes:
    base = directory / "old"
    base.write_bytes(old)
    came = bytearray()
    with base.open("rb") as file:
        apply_patch(file, BytesIO(patch), came.extend)
    return bytes(came)


def weights(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@settings(deadline=None)  # it writes files
@given(data=st.data())
def test_a_patched_file_is_the_newer_one(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("patch")
    size = data.draw(st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]), "size")
    old = weights(size)
    new = bytearray(old)
    for at in data.draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=200 if size else 0), "changed"):
        new[at] ^= 1 + at % 255
    if data.draw(st.booleans(), "much has changed"):
        new[: size // 2] = weights(size // 2, seed=1)
    patch = made(directory, old, bytes(new))
    assert patch is not None
    assert applied(directory, old, patch) == bytes(new)


def test_few_changes_make_a_small_patch(tmp_path: Path) -> None:
    old = weights(64 * BLOCK)
    new = bytearray(old)
    new[:: BLOCK // 8] = bytes(len(new[:: BLOCK // 8]))
    patch = made(tmp_path, old, bytes(new))
    assert patch is not None
    assert len(patch) < len(old) / 50


def test_changes_far_apart_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_, "BLOCK_BYTES", 1 << 19)
    old = weights(1 << 19)
    new = bytearray(old)
    new[-2] ^= 255
    patch = made(tmp_path, old, bytes(new))
    assert patch is not None
    assert applied(tmp_path, old, patch) == bytes(new)


def test_there_is_none_between_files_of_different_lengths_or_above_the_limit(tmp_path: Path) -> None:
    assert made(tmp_path, b"ab", b"abc") is None
    assert made(tmp_path, weights(BLOCK), weights(BLOCK, seed=1), max_bytes=BLOCK // 2) is None
    assert not (tmp_path / "patch").exists()


@settings(deadline=None)  # it writes files
@given(data=st.data())
def test_a_damaged_patch_gives_other_bytes_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("patch")
    old, new = weights(2 * BLOCK), weights(2 * BLOCK)
    new = new[:BLOCK] + weights(BLOCK // 8, seed=1) + new[BLOCK + BLOCK // 8 :]
    patch = bytearray(made(directory, old, new) or b"")
    what = data.draw(st.sampled_from(["cut", "longer", "changed"]), "what")
    if what == "cut":
        patch = patch[: data.draw(st.integers(0, len(patch) - 1), "to")]
    elif what == "longer":
        patch += b"x"
    else:
        patch[data.draw(st.integers(0, len(patch) - 1), "at")] ^= data.draw(st.integers(1, 255), "by")
    try:
        came = applied(directory, old, bytes(patch))
    except PatchInvalid:
        return
    assert what == "changed"
    assert len(came) == len(old)


def test_a_patch_that_would_grow_without_end_is_refused(tmp_path: Path) -> None:
    old = weights(BLOCK)
    body = zlib.compress(bytes(1000 * BLOCK))
    head = format_.MAGIC + BLOCK.to_bytes(8, "little")
    for kind in (format_.SPARSE, format_.DENSE):
        bomb = head + bytes([kind]) + len(body).to_bytes(4, "little") + body
        with pytest.raises(PatchInvalid, match="does not end within"):
            applied(tmp_path, old, bomb)
    with pytest.raises(PatchInvalid, match="a block of 4294967295 bytes"):
        applied(tmp_path, old, head + b"\2\xff\xff\xff\xff")
