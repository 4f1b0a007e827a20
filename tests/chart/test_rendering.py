"""Every value set is accepted by Helm 3 and 4, which agree, and by the schemas of Kubernetes."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.chart import helm
from tests.chart.helm import CHART, MAJORS, VALUE_SETS, every_value_set

KUBERNETES = ("1.30.0", "1.37.0")
"""The oldest that Chart.yaml accepts, and the newest that the validator knows."""

WITHOUT_SCHEMA = {
    *(
        "Certificate",
        "GRPCRoute",
        "LeaderWorkerSet",
        "PodMonitor",
        "PrometheusRule",
        "ScaledObject",
        "ServiceMonitor",
        "TriggerAuthentication",
    ),
}
"""Kinds of operators, which are no part of Kubernetes."""
BY_OPERATORS = WITHOUT_SCHEMA - {"LeaderWorkerSet"}
"""Those of which a package has the types. A LeaderWorkerSet's pods are checked as pods."""

OPERATORS = """
import { readFileSync } from "node:fs";
const packages = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const [group, version] = object.apiVersion.split("/");
  const module = await import(`@kubernetes-models/${packages[group]}/${group}/${version}/${object.kind}`);
  try {
    new module[object.kind](object).validate();
  } catch (error) {
    console.log(`${object.kind} ${object.metadata.name}: ${error.message}`);
  }
}
"""
"""Program of node that prints what is wrong with objects of operators. It does not find names that a type lacks."""


def test_there_are_at_least_a_dozen_value_sets_beside_the_examples() -> None:
    assert len(list((CHART / "ci").glob("*-values.yaml"))) >= 12
    assert {path.name for path in (CHART / "examples").iterdir()} == {
        "one-node.yaml",
        "8-engines.yaml",
        "100-engines.yaml",
        "1000-engines.yaml",
    }


@pytest.mark.parametrize("major", MAJORS)
@every_value_set
def test_lint_finds_nothing(values: Path, major: int) -> None:
    done = helm.helm(major, "lint", "--strict", CHART, "--values", values)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


@every_value_set
def test_both_majors_render_the_same(values: Path) -> None:
    assert helm.rendered(values, 3) == helm.rendered(values, 4)


def _pods_of_groups(values: Path) -> list[helm.Document]:
    return [pod for group in helm.documents(values, "LeaderWorkerSet") for pod in helm.templates(group)]


def _as_pod(template: helm.Document) -> str:
    named = {**template["metadata"], "name": "pod"}
    return "\n---\n" + json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": template["spec"]})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid(tmp_path: Path, version: str) -> None:
    python = helm.tool("venv/bin/python")
    files = []
    for values in VALUE_SETS:
        files.append(tmp_path / values.name)
        files[-1].write_text(helm.rendered(values) + "".join(map(_as_pod, _pods_of_groups(values))))

    command: list[str | Path] = [python, "-m", "kubernetes_validate", "--strict", "-k", version, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=590)

    complaints = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if not line.startswith("INFO") and not any(f"schema for kind {kind} " in line for kind in WITHOUT_SCHEMA)
    ]
    assert complaints == []
    assert done.returncode == 0


def test_every_object_of_an_operator_is_valid() -> None:
    folder = helm.tool("operators/node_modules").parent
    found = [
        document for values in VALUE_SETS for document in helm.documents(values) if document["kind"] in BY_OPERATORS
    ]
    command: list[str | Path] = ["node", "--input-type=module", "--eval", OPERATORS]
    done = subprocess.run(
        command, input=json.dumps(found), capture_output=True, text=True, check=False, timeout=120, cwd=folder
    )

    assert done.stdout.splitlines() == []
    assert done.returncode == 0, done.stderr
    assert {document["kind"] for document in found} == BY_OPERATORS
