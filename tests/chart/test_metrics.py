"""Rules and dashboards in the chart's files reach the cluster whole, and name metrics that the service has."""

import json
import re
import shutil
from pathlib import Path

from scripts.metrics_reference import PREFIX, sections
from scripts.metrics_reference import families as metrics_of
from tests.chart.helm import CHART, NAMESPACE, RELEASE, VALUE_SETS, documents, helm, load

ALERTS = sorted((CHART / "files/alerts").glob("*.yaml"))


def _names() -> set[str]:
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    families = [family for section in sections() for family in metrics_of(section)]
    return {PREFIX + family.name + suffix for family in families for suffix in suffixes[family.kind]}


def test_rules_name_metrics_that_exist_and_say_whom_they_are_about() -> None:
    known = _names()
    assert ALERTS
    for path in ALERTS:
        for group in load(path.read_text())["groups"]:
            for rule in group["rules"]:
                named = set(re.findall(r"\brollout_buffer_\w+", rule["expr"]))
                assert named, rule
                assert named <= known, rule
                if "alert" in rule:
                    assert rule["annotations"]["summary"]
                    assert rule["labels"]["severity"] in {"warning", "critical"}


def test_names_of_rules_are_unique() -> None:
    groups = [group for path in ALERTS for group in load(path.read_text())["groups"]]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]

    assert len({group["name"] for group in groups}) == len(groups)
    assert len(set(alerts)) == len(alerts)


def test_every_group_of_every_file_is_in_the_rule_object() -> None:
    (values,) = [path for path in VALUE_SETS if path.name == "monitoring-values.yaml"]
    (rule,) = documents(values, "PrometheusRule")

    written = [group for path in ALERTS for group in load(path.read_text())["groups"]]
    assert rule["spec"]["groups"] == written
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_every_dashboard_is_in_the_config_map_unchanged(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    dashboards = {"one.json": '{"title": "{{ job }}", "panels": []}\n', "two.json": '{"title": "two"}'}
    (chart / "files/dashboards").mkdir(exist_ok=True)
    for name, text in dashboards.items():
        (chart / "files/dashboards" / name).write_text(text)
    flags = ("--set", "security.insecure=true,metrics.dashboards.enabled=true")
    only = ("--show-only", "templates/metrics/dashboards.yaml")

    done = helm(4, "template", RELEASE, chart, "--namespace", NAMESPACE, *flags, *only)

    assert done.returncode == 0, done.stderr
    found = load(done.stdout)
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    for name, text in dashboards.items():
        assert json.loads(found["data"][name]) == json.loads(text)
