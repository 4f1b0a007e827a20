"""Rules and dashboards in the chart's files reach the cluster whole. What is in them: tests/monitoring."""

import json

from tests.chart.helm import CHART, VALUE_SETS, documents, load

ALERTS = sorted((CHART / "files/alerts").glob("*.yaml"))
DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
(MONITORING,) = [path for path in VALUE_SETS if path.name == "monitoring-values.yaml"]


def test_names_of_rules_are_unique() -> None:
    groups = [group for path in ALERTS for group in load(path.read_text())["groups"]]
    names = [rule.get("alert") or rule["record"] for group in groups for rule in group["rules"]]

    assert names
    assert len({group["name"] for group in groups}) == len(groups)
    assert len(set(names)) == len(names)


def test_every_group_of_every_file_is_in_the_rule_object() -> None:
    (rule,) = documents(MONITORING, "PrometheusRule")

    written = [group for path in ALERTS for group in load(path.read_text())["groups"]]
    assert rule["spec"]["groups"] == written
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_every_dashboard_is_in_the_config_map_unchanged() -> None:
    (found,) = [one for one in documents(MONITORING, "ConfigMap") if one["metadata"]["name"].endswith("-dashboards")]

    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {path.name: json.loads(path.read_text()) for path in DASHBOARDS} == {
        name: json.loads(text) for name, text in found["data"].items()
    }
