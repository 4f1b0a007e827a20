"""Weights on disk: complete when visible, checksummed, the same weights once, old ones gone."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from buffer_wire.errors import InvalidField
from trainer_client.manifest import FilesManifest
from trainer_client.publish import FilesPublisher

pytestmark = pytest.mark.matrix


def weights(content: bytes) -> dict[str, bytes]:
    return {"model.safetensors": content, "config/config.json": b"{}"}


def save(files: dict[str, bytes], directory: Path) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write(publisher: FilesPublisher, version: int, content: bytes | None = None, term: int = 1) -> FilesManifest:
    files = weights(content or b"weights %d" % version)
    return publisher.write(lambda directory: save(files, directory), term=term, version=version)


def on_disk(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_function_writes_what_the_manifest_describes(tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path / "w")
    manifest = write(publisher, 3, b"abc")
    directory = Path(manifest.base_url)
    assert directory.parent == tmp_path / "w"
    assert directory.name.startswith("v00000003-e1-")
    for file in manifest.files:
        content = (directory / file.name).read_bytes()
        assert file.size_bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).digest()
    assert [file.name for file in manifest.files] == ["config/config.json", "model.safetensors"]


def test_a_directory_is_copied_and_may_then_change(tmp_path: Path) -> None:
    source = tmp_path / "out"
    save(weights(b"first"), source)
    publisher = FilesPublisher(tmp_path / "w")
    manifest = publisher.write(source, term=1, version=1)
    (source / "model.safetensors").write_bytes(b"second")
    assert (Path(manifest.base_url) / "model.safetensors").read_bytes() == b"first"


def test_a_write_that_the_disk_had_no_room_for_is_no_version_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = FilesPublisher(tmp_path)
    whole = Path.write_text

    def full(path: Path, *arguments: str) -> int:
        whole(path, "")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            write(publisher, 1, b"same")
    assert publisher.versions == []
    manifest = write(publisher, 1, b"same")
    assert publisher.versions == FilesPublisher(tmp_path).versions == [1]
    assert (Path(manifest.base_url) / "model.safetensors").read_bytes() == b"same"


def test_the_same_weights_again_are_the_same_manifest(tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path)
    assert write(publisher, 1, b"same") == write(publisher, 1, b"same")
    assert publisher.versions == [1]
    other = write(publisher, 1, b"other")
    assert other != write(publisher, 1, b"same")
    assert write(publisher, 1, b"same", term=2).base_url != write(publisher, 1, b"same").base_url


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path)

    def fail(directory: Path) -> None:
        save(weights(b"half"), directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publisher.write(fail, term=1, version=1)
    assert on_disk(tmp_path) == []


@pytest.mark.parametrize("source", ["missing", "empty"])
def test_no_files_are_refused_by_name(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    publisher = FilesPublisher(tmp_path / "w")
    with pytest.raises(InvalidField) as raised:
        publisher.write(tmp_path / source, term=1, version=1)
    assert raised.value.attributes["field"] == "source"
    assert on_disk(tmp_path / "w") == []


def test_versions_go_when_a_checkpoint_passes_them(tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path, keep=2)
    for version in range(1, 7):
        publisher.published(write(publisher, version), committed_steps=version)
    assert publisher.versions == [1, 2, 3, 4, 5, 6]
    publisher.checkpointed(4)
    assert publisher.versions == [4, 5, 6]
    publisher.checkpointed(6)
    assert publisher.versions == [5, 6]
    assert len(on_disk(tmp_path)) == 4
    publisher.checkpointed(2)
    publisher.published(write(publisher, 7), committed_steps=7)
    assert publisher.versions == [6, 7]


def test_a_later_process_knows_what_it_finds(tmp_path: Path) -> None:
    publisher = FilesPublisher(tmp_path, keep=1)
    for version in range(1, 6):
        publisher.published(write(publisher, version), committed_steps=version)
    later = FilesPublisher(tmp_path, keep=1)
    assert later.versions == [1, 2, 3, 4, 5]
    later.resumed(3)
    later.published(write(later, 4, b"anew", term=2), committed_steps=4)
    # What was published after step 3 is abandoned; what a resume could still be offered stays.
    assert sorted(later.versions) == [1, 2, 3, 4]
    later.checkpointed(4)
    assert later.versions == [4]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    write(FilesPublisher(tmp_path), 1)
    save(weights(b"half"), tmp_path / ".writing-x1")
    save(weights(b"renamed, never offered"), tmp_path / "v00000002-e1-000000000000")
    (tmp_path / "v00000003-e1-000000000000.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    assert FilesPublisher(tmp_path).versions == [1]
    kept = on_disk(tmp_path)
    assert len(kept) == 3
    assert "notes.txt" in kept


@pytest.mark.parametrize(("option", "value"), [("keep", 0), ("serve", "ftp")])
def test_bad_options_are_refused(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(InvalidField) as raised:
        FilesPublisher(tmp_path, **{option: value})  # type: ignore[arg-type]
    assert raised.value.attributes["field"] == option
