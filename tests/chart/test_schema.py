"""values.schema.json is that of today's settings and options; values.yaml explains every value; versions agree."""

import re
import tomllib
from collections.abc import Iterator

import pytest

from buffer_service.settings import Settings
from rollout_workers.options import WorkerOptions
from scripts import chart_schema
from tests.chart.helm import CHART, ROOT, load

SCHEMA = chart_schema.values_schema()


def test_the_schema_is_up_to_date() -> None:
    assert chart_schema.main(["--check"]) == 0, "run `python -m scripts.chart_schema`"


def test_every_setting_is_in_the_schema_or_given_by_the_chart() -> None:
    known = set(SCHEMA["definitions"]["serviceSettings"]["properties"])

    assert known | chart_schema.CHART_SETTINGS >= set(Settings.model_fields)
    assert known <= set(Settings.model_fields)
    assert not known & chart_schema.CHART_SETTINGS


def test_every_option_is_in_the_schema_or_given_by_the_chart() -> None:
    known = set(SCHEMA["definitions"]["workerOptions"]["properties"])

    assert known | chart_schema.CHART_OPTIONS >= set(WorkerOptions.__dataclass_fields__)
    assert known <= set(WorkerOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("option", "least", "most"),
    [("groups_per_engine", 1, 256), ("lease_wait_s", 0, 60), ("bundle_bytes", 1, 32 << 20), ("keep_versions", 1, 1000)],
)
def test_bounds_are_those_that_the_options_check(option: str, least: int, most: int) -> None:
    found = SCHEMA["definitions"]["workerOptions"]["properties"][option]

    assert (found["minimum"], found["maximum"]) == (least, most)


def test_durations_have_to_be_above_zero() -> None:
    found = SCHEMA["definitions"]["workerOptions"]["properties"]["drain_grace_s"]

    assert found["exclusiveMinimum"] == 0
    assert "maximum" not in found


def test_every_object_refuses_what_it_does_not_list() -> None:
    def open_objects(node: object, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            is_object = node.get("type") == "object" and isinstance(node.get("properties"), dict)
            if is_object and node.get("additionalProperties") is not False:
                yield path
            for key, value in node.items():
                yield from open_objects(value, f"{path}/{key}")
        elif isinstance(node, list):
            for item in node:
                yield from open_objects(item, path)

    assert list(open_objects(SCHEMA, "")) == []


def test_values_hold_every_name_of_the_schema() -> None:
    values = load((CHART / "values.yaml").read_text())

    def missing(schema: dict[str, object], given: dict[str, object], path: str) -> Iterator[str]:
        properties = schema.get("properties", {})
        assert isinstance(properties, dict)
        for name, inner in properties.items():
            if name == "global":
                continue
            if name not in given:
                yield f"{path}.{name}"
            elif isinstance(inner, dict) and isinstance(value := given[name], dict):
                yield from missing(inner, value, f"{path}.{name}")

    assert list(missing(SCHEMA, values, "")) == []


SAY_IT_THEMSELVES = {
    *(
        "replicas",
        "image",
        "resources",
        "podAnnotations",
        "podLabels",
        "nodeSelector",
        "tolerations",
        "affinity",
        "labels",
    ),
    *("enabled", "repository", "pullPolicy", "minReplicas", "maxReplicas", "mountPath", "name", "annotations"),
    *("runtimeClassName", "priorityClassName", "ports", "podDisruptionBudget", "service", "tls", "tokens"),
}


def test_every_value_has_a_comment_above_it_or_above_what_holds_it() -> None:
    explained: dict[int, bool] = {}
    bare = []
    before = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if match := re.match(r"( *)([A-Za-z]+):", line):
            indent = len(match[1])
            explained = {level: value for level, value in explained.items() if level < indent}
            explained[indent] = before.lstrip().startswith("#")
            if not any(explained.values()) and indent and match[2] not in SAY_IT_THEMSELVES:
                bare.append(line.strip())
        before = line
    assert bare == []


def test_versions_are_those_of_the_package() -> None:
    chart = load((CHART / "Chart.yaml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert chart["appVersion"] == package["version"]
    assert chart["version"] == package["version"]
    assert chart["kubeVersion"] == ">=1.30.0-0"
