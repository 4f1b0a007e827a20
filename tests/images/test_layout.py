"""Tests of the images that were built: what the layout holds is whole, says what it is of, and can be pushed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm import ROOT
from tests.support.container import LAYOUT, configuration, index, unpacked
from tests.support.mortal import mortal
from tests.support.sentinels import free_port

pytestmark = [
    pytest.mark.skipif(LAYOUT not in os.environ, reason="no images are built: make test-images"),
    pytest.mark.timeout(300),
]
IMAGES = ("service", "worker")
every_image = pytest.mark.parametrize("image", IMAGES)
NAME = "org.opencontainers.image.ref.name"


@pytest.fixture
def layout() -> Path:
    return Path(os.environ[LAYOUT]).absolute()


def test_every_blob_has_the_digest_and_size_that_it_is_named_by(layout: Path) -> None:
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    blobs = {path.name: path.stat().st_size for path in (layout / "blobs/sha256").iterdir()}
    for path in (layout / "blobs/sha256").iterdir():
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == path.name
    reached = set()
    for manifest in index(layout):
        inner = _manifest(layout, manifest)
        for each in (manifest, inner["config"], *inner["layers"]):
            assert blobs[each["digest"].removeprefix("sha256:")] == each["size"]
            reached.add(each["digest"].removeprefix("sha256:"))
    assert reached == set(blobs)


@every_image
def test_an_image_says_what_it_is_of_and_runs_as_the_charts_user(layout: Path, image: str) -> None:
    config = configuration(layout, image)
    labels = config["config"]["Labels"]
    dated = subprocess.run(
        ["git", "show", "--no-patch", "--format=%ct", labels["org.opencontainers.image.revision"]],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)

    assert version is not None
    assert labels["org.opencontainers.image.version"] == version[1]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["config"]["User"] == "10001:10001"
    assert config["config"]["Entrypoint"] == ["rollout-buffer"]
    assert (config["os"], config["created"]) == ("linux", _utc(int(dated)))


@every_image
def test_layers_are_of_one_time_and_bytecode_does_not_ask_for_it(layout: Path, image: str) -> None:
    descriptor = next(each for each in index(layout) if each["annotations"][NAME] == image)
    *_, product = _manifest(layout, descriptor)["layers"]
    created, compiled = configuration(layout, image)["created"], 0
    with tarfile.open(layout / "blobs" / product["digest"].replace(":", "/")) as layer:
        for member in layer:
            assert _utc(int(member.mtime)) == created, member.name
            if member.name.endswith(".pyc"):
                content = layer.extractfile(member)
                assert content is not None
                # A hash of the source, which is not checked (PEP 552).
                assert content.read(8)[4:] == b"\1\0\0\0", member.name
                compiled += 1
    assert compiled > 500


@every_image
def test_bill_of_materials_refers_to_the_image_and_names_all_that_is_installed(layout: Path, image: str) -> None:
    found = {each["annotations"][NAME]: each for each in index(layout)}
    manifest = _manifest(layout, found[f"{image}-sbom"])
    (layer,) = manifest["layers"]
    bom = json.loads((layout / "blobs" / layer["digest"].replace(":", "/")).read_text())
    root, _ = unpacked(image)
    python = {(each["name"], each["version"]) for each in bom["components"] if each["purl"].startswith("pkg:pypi/")}
    debian = {each["name"] for each in bom["components"] if each["purl"].startswith("pkg:deb/")}
    installed = {
        tuple(path.name.removesuffix(".dist-info").lower().replace("_", "-").rsplit("-", 1))
        for path in root.glob("opt/rollout-buffer/lib/python*/site-packages/*.dist-info")
    }
    pinned = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )

    assert manifest["subject"]["digest"] == found[image]["digest"]
    assert manifest["artifactType"] == layer["mediaType"] == "application/vnd.cyclonedx+json"
    assert python == installed
    assert debian == set(re.findall(r"^Package: (.+)$", (root / "var/lib/dpkg/status").read_text(), re.MULTILINE))
    assert {name: version for name, version in python if name in pinned} == {
        name: pinned[name] for name, _ in python if name in pinned
    }
    assert (
        "rollout-buffer",
        configuration(layout, image)["config"]["Labels"]["org.opencontainers.image.version"],
    ) in python


# It builds once more.
@pytest.mark.timeout(900)
def test_the_same_commit_gives_the_same_images(layout: Path, tmp_path: Path) -> None:
    commit = configuration(layout, "service")["config"]["Labels"]["org.opencontainers.image.revision"]
    again = tmp_path / "again"
    subprocess.run(
        [ROOT / "deploy/containers/build.sh", shutil.which("python3") or "python3", again, "service"],
        check=True, timeout=850, env={**os.environ, "COMMIT": commit},
    )  # fmt: skip

    assert index(again) == [each for each in index(layout) if each["annotations"][NAME].startswith("service")]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Debian's registry on loopback; skips the test where it is not installed."""
    binary = shutil.which("docker-registry")
    if binary is None:
        pytest.skip("docker-registry is not on PATH")
    at = f"127.0.0.1:{free_port()}"
    config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(tmp_path)}}, "http": {"addr": at}}
    (tmp_path / "registry.yml").write_text(json.dumps(config))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(mortal([binary, "serve", str(tmp_path / "registry.yml")]), stdout=log, stderr=log)
    try:
        yield at
    finally:
        process.kill()
        process.wait()


def test_images_and_their_bills_of_materials_are_in_a_registry_as_they_were_built(layout: Path, registry: str) -> None:
    push = [str(ROOT / "deploy/containers/push.sh"), str(layout), f"{registry}/rollout-buffer"]
    subprocess.run(push, check=True, timeout=120, env={**os.environ, "PUSH_ARGS": "--dest-tls-verify=false"})
    version = configuration(layout, "service")["config"]["Labels"]["org.opencontainers.image.version"]
    for each in index(layout):
        image, _, bill = each["annotations"][NAME].partition("-")
        tag = f"{version}-{bill}" if bill else version
        there = subprocess.run(
            ["skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{registry}/rollout-buffer/{image}:{tag}"],
            capture_output=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        assert f"sha256:{hashlib.sha256(there).hexdigest()}" == each["digest"]


def _manifest(layout: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_text())
    return found


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
