"""Tests of what depends on the objects that a cluster has: replicas beside an autoscaler, and the files of reward
functions.
"""

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.chart.cluster import render_in_cluster, thing
from tests.chart.helm import MAJORS, Document, render_with

SERVICE, POOL = "rl-rollout-buffer", "rl-rollout-buffer-w"
SCALED = """
security: {insecure: true}
service: {autoscaling: {enabled: true, minReplicas: 3}}
workers: [{name: w, run: r, kind: %s, options: {reward: 'm:f'}, engine: {source: simulate},
  autoscaling: {enabled: true, minReplicas: 2, maxReplicas: 40}}]
"""
CODED = """
security: {insecure: true}
workers: [{name: w, run: r, codeConfigMap: rewards, podAnnotations: {a: b}, options: {reward: 'm:f'},
  engine: {source: simulate}}]
"""


def specs(rendered: str) -> dict[str, Document]:
    """Specs of the service and the pool, by name."""
    found = [each for each in yaml.load_all(rendered, Loader=yaml.CSafeLoader) if each]
    wanted = [each for each in found if each["kind"] in {"Deployment", "StatefulSet"}]
    return {each["metadata"]["name"]: each["spec"] for each in wanted}


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_what_an_autoscaler_gets_keeps_the_number_that_it_has(tmp_path: Path, kind: str, major: int) -> None:
    running = [thing("Deployment", SERVICE, spec={"replicas": 7}), thing(kind, POOL, spec={"replicas": 30})]

    found = specs(render_in_cluster(tmp_path, SCALED % kind, *running, major=major))

    assert (found[SERVICE]["replicas"], found[POOL]["replicas"]) == (7, 30)


def test_what_is_new_begins_with_the_autoscalers_least(tmp_path: Path) -> None:
    found = specs(render_in_cluster(tmp_path, SCALED % "StatefulSet"))

    assert (found[SERVICE]["replicas"], found[POOL]["replicas"]) == (3, 2)


def test_without_a_cluster_the_number_is_left_to_the_autoscaler(tmp_path: Path) -> None:
    found = specs(render_with(tmp_path, SCALED % "Deployment").stdout)

    assert "replicas" not in found[SERVICE]
    assert "replicas" not in found[POOL]


def test_without_an_autoscaler_the_number_is_that_of_the_values(tmp_path: Path) -> None:
    running = thing("StatefulSet", POOL, spec={"replicas": 30})

    assert specs(render_in_cluster(tmp_path, CODED, running))[POOL]["replicas"] == 1


def test_pods_change_with_the_files_of_their_functions(tmp_path: Path) -> None:
    def annotations(*objects: Document, major: int = 4) -> Document:
        found: Document = specs(render_in_cluster(tmp_path, CODED, *objects, major=major))[POOL]["template"]["metadata"]
        return found["annotations"]  # type: ignore[no-any-return]

    first = annotations(thing("ConfigMap", "rewards", data={"m.py": "one"}))
    assert first["a"] == "b"
    assert annotations(thing("ConfigMap", "rewards", data={"m.py": "one"}), major=3) == first
    second = annotations(thing("ConfigMap", "rewards", data={"m.py": "two"}))
    third = annotations(thing("ConfigMap", "rewards", data={"m.py": "one"}, binaryData={"b": "AA=="}))
    assert len({each["checksum/code"] for each in (first, second, third)}) == 3
    assert annotations() == {"a": "b"}, "one that is not there yet is nothing"
