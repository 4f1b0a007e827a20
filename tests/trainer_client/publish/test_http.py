"""Weights over http: whole, in ranges, and nothing that is not offered."""

import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from trainer_client.manifest import FilesManifest
from trainer_client.publish import FilesPublisher
from trainer_client.publish.http import parse_range

pytestmark = pytest.mark.matrix

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[FilesPublisher]:
    (tmp_path / "secret").write_text("not yours")
    with FilesPublisher(tmp_path / "w", keep=1, serve="http") as made:
        yield made


@pytest.fixture
def manifest(publisher: FilesPublisher) -> FilesManifest:
    def save(directory: Path) -> None:
        (directory / "a b.bin").write_bytes(CONTENT)
        (directory / "empty").write_bytes(b"")
        (directory / "sub").mkdir()
        (directory / "sub" / "c").write_bytes(b"deep")

    return publisher.write(save, term=1, version=1)


@pytest.fixture
def connection(manifest: FilesManifest) -> Iterator[HTTPConnection]:
    made = HTTPConnection(urlsplit(manifest.base_url).netloc, timeout=10)
    yield made
    made.close()


def ask(
    connection: HTTPConnection, url: str, wanted: str | None = None, method: str = "GET"
) -> tuple[HTTPResponse, bytes]:
    connection.request(method, url, headers={"Range": wanted} if wanted else {})
    response = connection.getresponse()
    return response, response.read()


def path_of(manifest: FilesManifest) -> str:
    return urlsplit(manifest.base_url).path


def test_what_was_published_before_a_restart_is_found_after_it(tmp_path: Path) -> None:
    def save(directory: Path) -> None:
        (directory / "model").write_bytes(CONTENT)

    with FilesPublisher(tmp_path / "w", serve="http") as before:
        manifest = before.write(save, term=1, version=1)
    with FilesPublisher(tmp_path / "w", serve="http"):
        connection = HTTPConnection(urlsplit(manifest.base_url).netloc, timeout=10)
        response, body = ask(connection, f"{path_of(manifest)}/model")
        connection.close()
    assert (response.status, body) == (200, CONTENT)


@pytest.mark.parametrize("remembered", [None, "no port", "99999"])
def test_a_port_that_cannot_be_had_again_is_replaced_and_said(
    tmp_path: Path, remembered: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (tmp_path / ".port").write_text(remembered or f"{taken}\n")
        with FilesPublisher(tmp_path, serve="http") as publisher:
            manifest = publisher.write(lambda directory: (directory / "m").write_bytes(b"1"), term=1, version=1)
    assert urlsplit(manifest.base_url).port not in {None, taken, 0}
    assert (tmp_path / ".port").read_text() == f"{urlsplit(manifest.base_url).port}\n"
    assert "until the next publish" in caplog.text


def test_the_base_url_is_on_loopback(manifest: FilesManifest) -> None:
    assert manifest.base_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(("name", "content"), [("/a%20b.bin", CONTENT), ("/empty", b""), ("/sub/c", b"deep")])
def test_every_file_of_a_manifest_is_served(
    manifest: FilesManifest, connection: HTTPConnection, name: str, content: bytes
) -> None:
    response, body = ask(connection, path_of(manifest) + name)
    assert (response.status, body) == (200, content)
    assert response.getheader("Content-Length") == str(len(content))
    assert response.getheader("Accept-Ranges") == "bytes"


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=10000-", 10000, 10240),
        ("bytes=10000-99999", 10000, 10240),
        ("bytes=-40", 10200, 10240),
        ("bytes=-99999", 0, 10240),
        ("bytes=0-", 0, 10240),
    ],
)
def test_ranges_are_served(
    manifest: FilesManifest, connection: HTTPConnection, wanted: str, start: int, stop: int
) -> None:
    response, body = ask(connection, path_of(manifest) + "/a%20b.bin", wanted)
    assert (response.status, body) == (206, CONTENT[start:stop])
    assert response.getheader("Content-Range") == f"bytes {start}-{stop - 1}/10240"


@pytest.mark.parametrize("wanted", ["bytes=10240-", "bytes=99999-100000", "bytes=-0"])
def test_ranges_outside_of_the_file_are_refused(
    manifest: FilesManifest, connection: HTTPConnection, wanted: str
) -> None:
    response, body = ask(connection, path_of(manifest) + "/a%20b.bin", wanted)
    assert (response.status, body) == (416, b"")
    assert response.getheader("Content-Range") == "bytes */10240"
    assert ask(connection, path_of(manifest) + "/sub/c")[1] == b"deep"


@pytest.mark.parametrize("wanted", ["bytes=5-3", "bytes=0-1,5-6", "lines=1-2", "bytes=-", "bytes=x-y"])
def test_a_range_header_that_means_nothing_to_us_gets_the_whole(wanted: str) -> None:
    assert parse_range(wanted, 100) is None


def test_a_head_request_gets_no_body(manifest: FilesManifest, connection: HTTPConnection) -> None:
    response, body = ask(connection, path_of(manifest) + "/a%20b.bin", method="HEAD")
    assert (response.status, body, response.getheader("Content-Length")) == (200, b"", "10240")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/secret",
        "/../secret",
        "/%2e%2e/secret",
        "{base}",
        "{base}/",
        "{base}/missing",
        "{base}/../../secret",
        "{base}/..%2f..%2fsecret",
        "{base}/sub/../a%20b.bin",
        "{base}//a%20b.bin",
        "{base}.json",
    ],
)
def test_nothing_else_can_be_read(manifest: FilesManifest, connection: HTTPConnection, path: str) -> None:
    # http.client sends the path as it is, dots and all.
    response, body = ask(connection, path.format(base=path_of(manifest)))
    assert response.status == 404
    assert b"not yours" not in body


def test_other_methods_are_refused(manifest: FilesManifest, connection: HTTPConnection) -> None:
    response, _ = ask(connection, path_of(manifest) + "/empty", method="DELETE")
    assert response.status == 501


def test_a_version_that_went_is_not_served_any_more(
    publisher: FilesPublisher, manifest: FilesManifest, connection: HTTPConnection
) -> None:
    publisher.published(manifest, committed_steps=1)
    newer = publisher.write(lambda directory: (directory / "x").write_bytes(b"x"), term=1, version=2)
    publisher.published(newer, committed_steps=2)
    publisher.checkpointed(2)
    assert ask(connection, path_of(manifest) + "/sub/c")[0].status == 404
    assert ask(connection, path_of(newer) + "/x")[1] == b"x"


def test_a_reader_that_goes_away_harms_nobody(manifest: FilesManifest, connection: HTTPConnection) -> None:
    host, port = urlsplit(manifest.base_url).netloc.split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"GET {path_of(manifest)}/a%20b.bin HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert ask(connection, path_of(manifest) + "/sub/c")[1] == b"deep"


def test_a_fixed_port_is_served_by_the_next_process(tmp_path: Path) -> None:
    with FilesPublisher(tmp_path, serve="http") as first:
        manifest = first.write(lambda directory: (directory / "x").write_bytes(b"x"), term=1, version=1)
        port = urlsplit(manifest.base_url).port
        assert port is not None
    with FilesPublisher(tmp_path, serve="http", port=port):
        made = HTTPConnection(f"127.0.0.1:{port}", timeout=10)
        assert ask(made, path_of(manifest) + "/x")[1] == b"x"
        made.close()
