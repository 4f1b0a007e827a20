"""The chart rendered by the real Helm: value sets, documents, and where things are in them.

The tools come from scripts/chart_tools.sh. Where they are missing, tests skip; `make chart` sets RB_CHART_TOOLS=1, and
then they fail instead.
"""

import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/rollout-buffer"
TOOLS = ROOT / ".cache/chart-tools"
RELEASE, NAMESPACE = "rl", "training"
MAJORS = (3, 4)

Document = dict[str, Any]

KIND = ROOT / "deploy/kind/values.yaml"
VALUE_SETS = sorted([*(CHART / "ci").glob("*-values.yaml"), *(CHART / "examples").glob("*.yaml"), KIND])
SET_NAMES = ["kind" if path == KIND else path.stem.removesuffix("-values") for path in VALUE_SETS]
every_value_set = pytest.mark.parametrize("values", VALUE_SETS, ids=SET_NAMES)


def tool(name: str) -> Path:
    """A program of the chart's tools; skips the test, or fails it under `make chart`, where it is missing."""
    path = TOOLS / name
    if not path.exists():
        missing(f"{path.relative_to(ROOT)} is missing: `make chart` installs it")
    return path


def missing(message: str) -> NoReturn:
    """Skip the test, or fail it where everything has to be there."""
    if os.environ.get("RB_CHART_TOOLS"):
        pytest.fail(message)
    pytest.skip(message)


def helm(major: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One run of Helm, whatever its exit status."""
    # Without the user's own plugins, repositories and cluster.
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "KUBECONFIG": "/dev/null"}
    command = [str(tool(f"helm{major}")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


@functools.cache
def rendered(values: Path, major: int = 4) -> str:
    """Return what `helm template` prints."""
    done = helm(major, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", values)
    assert done.returncode == 0, f"{values.name}, Helm {major}: {done.stderr}"
    return done.stdout


@functools.cache
def _documents(values: Path) -> tuple[Document, ...]:
    return tuple(document for document in yaml.load_all(rendered(values), Loader=yaml.CSafeLoader) if document)


def documents(values: Path, *kinds: str) -> list[Document]:
    """The objects of a value set, of these kinds or of all."""
    return [document for document in _documents(values) if not kinds or document["kind"] in kinds]


def load(text: str) -> Any:
    """One document of YAML."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def render_with(folder: Path, values: str, major: int = 4) -> subprocess.CompletedProcess[str]:
    """`helm template` with values given as text."""
    path = folder / "values.yaml"
    path.write_text(values)
    return helm(major, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", path)


@dataclass(frozen=True)
class Pod:
    """A pod, or the template of one. `owner` is the object that it is of."""

    owner: Document
    metadata: Document
    spec: Document

    @property
    def name(self) -> str:
        """Name of the owner, with its kind."""
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the pod."""
        labels: dict[str, str] = self.metadata["labels"]
        return labels

    @property
    def containers(self) -> list[Document]:
        """List all of them, those that start first before the others."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def volumes(self) -> dict[str, Document]:
        """Volumes by name, with those that claims are made for."""
        claims = self.owner["spec"].get("volumeClaimTemplates", [])
        return {volume["name"]: volume for volume in self.spec["volumes"]} | {
            claim["metadata"]["name"]: claim for claim in claims
        }

    def container(self, name: str) -> Document:
        """The one with this name."""
        return next(container for container in self.containers if container["name"] == name)


def pods(values: Path) -> list[Pod]:
    """Every pod that a value set makes."""
    found = []
    for document in documents(values):
        if document["kind"] == "Pod":
            found.append(Pod(document, document["metadata"], document["spec"]))
        found += [Pod(document, template["metadata"], template["spec"]) for template in templates(document)]
    return found


def templates(document: Document) -> list[Document]:
    """The pod templates of an object."""
    spec = document.get("spec", {})
    if document["kind"] == "CronJob":
        return [spec["jobTemplate"]["spec"]["template"]]
    if document["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return [spec["template"]] if "template" in spec else []


def pods_of(values: Path, component: str) -> list[Pod]:
    """Those of the service, the store, the workers, or the test."""
    return [pod for pod in pods(values) if pod.labels["app.kubernetes.io/component"] == component]


def environment(container: Document) -> dict[str, str]:
    """Variables that are given as text, with references to others filled in as Kubernetes does."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        value = variable.get("value", f"<{variable['name']}>")
        for name, other in found.items():
            value = value.replace(f"$({name})", other)
        found[variable["name"]] = value
    return found


def strings(node: Any) -> Iterator[str]:
    """Every string in a document, keys included."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from strings(value)
    elif isinstance(node, list):
        for item in node:
            yield from strings(item)
    elif isinstance(node, str):
        yield node
