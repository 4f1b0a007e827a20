"""Weights over https with a token: who has it reads them, and nobody else, by the version's path or by digest."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_wire.connection.access import Access
from buffer_wire.errors import InvalidField
from tests.security.certificates import Authority
from trainer_client.publish import FilesPublisher, WeightsDoor

CONTENT = bytes(range(256)) * 40
TOKEN = "of-the-weights"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"), "weights")


@pytest.fixture
def publisher(tmp_path: Path, authority: Authority) -> Iterator[FilesPublisher]:
    own = authority.issue("localhost")
    (tmp_path / "token").write_text(TOKEN)
    with FilesPublisher(
        tmp_path / "w",
        serve="http",
        advertised_host="localhost",
        door=WeightsDoor(Access(token_file=tmp_path / "token"), tls_cert=own.cert, tls_key=own.key),
    ) as made:
        yield made


def read(url: str, authority: Authority, token: str | None = TOKEN) -> bytes:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    context = ssl.create_default_context(cafile=str(authority.cert))
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context, timeout=10) as answer:
        content: bytes = answer.read()
    return content


def write(publisher: FilesPublisher, version: int = 1) -> tuple[str, str]:
    """Address of a version's file, by its path and by its digest."""
    manifest = publisher.write(lambda into: (into / "m").write_bytes(CONTENT), term=1, version=version)
    root = manifest.base_url.rpartition("/")[0]
    return f"{manifest.base_url}/m", f"{root}/sha256/{manifest.files[0].sha256.hex()}"


def test_who_has_the_token_reads_by_path_and_by_digest(publisher: FilesPublisher, authority: Authority) -> None:
    for url in write(publisher):
        assert url.startswith("https://localhost:")
        assert read(url, authority) == CONTENT


@pytest.mark.parametrize("token", [None, "", "another", TOKEN + "x"])
def test_nobody_else_is_told_what_there_is(publisher: FilesPublisher, authority: Authority, token: str | None) -> None:
    there, by_digest = write(publisher)
    for url in (there, by_digest, there + "-not-there"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            read(url, authority, token)
        assert caught.value.code == 401
        assert caught.value.read() == b""


def test_plain_http_and_another_authority_get_nothing(publisher: FilesPublisher, tmp_path: Path) -> None:
    url, _ = write(publisher)
    other = Authority(tmp_path, "other")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        read(url, other)
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(url.replace("https:", "http:"), timeout=10)


def test_a_certificate_and_a_token_are_replaced_while_it_serves(
    publisher: FilesPublisher, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_wire.weights.door.POLL_S", 0.0)
    monkeypatch.setattr("buffer_wire.connection.access.POLL_S", 0.0)
    url, _ = write(publisher)
    other = Authority(tmp_path, "other")
    own, new = authority.issue("localhost"), other.issue("localhost")
    for old_file, new_file in ((own.cert, new.cert), (own.key, new.key)):
        Path(old_file).write_bytes(Path(new_file).read_bytes())
    (tmp_path / "token").write_text("new-token")
    assert read(url, other, "new-token") == CONTENT
    with pytest.raises(urllib.error.HTTPError):
        read(url, other)


def test_files_that_do_not_go_together_are_refused(authority: Authority) -> None:
    with pytest.raises(InvalidField, match="given together"):
        WeightsDoor(tls_cert=authority.cert)
    with pytest.raises(InvalidField, match="the key of"):
        WeightsDoor(tls_cert=authority.issue("a").cert, tls_key=authority.issue("b").key)
