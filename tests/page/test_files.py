"""The page's files: types, caching, and what a browser is told that it may do with them."""

import re
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest

from buffer_service.admin.page_files import FOLDER, INDEX
from tests.support.service import ServiceProcess

NAMES = sorted(path.name for path in FOLDER.iterdir())


def fetched(service: ServiceProcess, path: str, **headers: str) -> tuple[int, Message, bytes]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(service.admin + path, headers=given), timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_with_its_type_and_asked_for_again(service: ServiceProcess, name: str) -> None:
    types = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
    status, headers, content = fetched(service, f"/page/{name}")
    assert (status, content) == (200, (FOLDER / name).read_bytes())
    assert headers["Content-Type"].partition(";")[0] == types[Path(name).suffix]
    assert headers["Cache-Control"] == "no-cache"
    assert fetched(service, f"/page/{name}", If_None_Match=f'"x", {headers["ETag"]}')[0] == 304
    assert fetched(service, f"/page/{name}", If_None_Match='"x"')[0] == 200


def test_the_page_lies_at_the_root(service: ServiceProcess) -> None:
    status, headers, content = fetched(service, "/")
    assert (status, content) == (200, (FOLDER / INDEX).read_bytes())
    assert headers["Content-Type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "path", ["/page/absent.js", "/page/", "/page/..%2Fapp.py", "/page/../app.py", "/page/%2e%2e/x"]
)
def test_there_is_nothing_else(service: ServiceProcess, path: str) -> None:
    assert fetched(service, path)[0] == 404


@pytest.mark.parametrize(
    "path", ["/", "/page/page.js", "/page/absent", "/api", "/api/runs/absent", "/metrics", "/livez"]
)
def test_every_answer_says_what_a_browser_may_do(service: ServiceProcess, path: str) -> None:
    _, headers, _ = fetched(service, path)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] in {"no-cache", "no-store"}


def test_data_is_kept_nowhere(service: ServiceProcess) -> None:
    for path in ("/api", "/api/runs", "/metrics"):
        assert fetched(service, path)[1]["Cache-Control"] == "no-store", path


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = (FOLDER / INDEX).read_text()
    assert not re.findall(r"<script(?![^>]*\ssrc=)[^>]*>", page)
    assert not re.findall(r"<style|\sstyle=|\son[a-z]+=", page)
    asked = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    imported = [found for name in NAMES for found in re.findall(r'from "(.*?)"', (FOLDER / name).read_text())]
    assert {Path(path).name for path in (*asked, *imported)} == set(NAMES) - {INDEX}
    assert all(path.startswith("/page/") for path in asked)
    assert all(path.startswith("./") for path in imported)


def test_no_script_writes_html() -> None:
    for name in NAMES:
        text = (FOLDER / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_every_id_that_scripts_ask_for_is_there() -> None:
    ids = re.findall(r'\sid="([^"]+)"', (FOLDER / INDEX).read_text())
    assert len(ids) == len(set(ids))
    asked = {
        found
        for name in NAMES
        if name.endswith(".js")
        for found in re.findall(r'(?:byId|getElementById)\("([^"]+)"\)', (FOLDER / name).read_text())
    }
    assert asked
    assert asked <= set(ids)
