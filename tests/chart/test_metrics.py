"""Rules and dashboards in the chart's files reach the cluster whole. What is in them: tests/monitoring."""

import json
from pathlib import Path

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


def test_workers_and_engines_within_their_pods_are_read() -> None:
    monitors = {one["metadata"]["name"].rpartition("-")[2]: one for one in documents(MONITORING, "PodMonitor")}
    paths = {
        name: [endpoint["path"] for endpoint in one["spec"]["podMetricsEndpoints"]] for name, one in monitors.items()
    }

    assert paths == {
        "beside": ["/metrics", "/engines/0/metrics"],
        "within": ["/metrics", "/engines/0/metrics", "/engines/1/metrics"],
    }
    pods = {
        one["metadata"]["name"].rpartition("-")[2]: one["spec"]["template"]
        for one in documents(MONITORING, "StatefulSet")
        if one["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    }
    for name, monitor in monitors.items():
        pod, selected = pods[name], monitor["spec"]["selector"]["matchLabels"]
        assert selected.items() <= pod["metadata"]["labels"].items()
        (worker,) = pod["spec"]["containers"]
        assert {"name": "metrics", "containerPort": 9100} in worker["ports"]
        assert "--metrics-listen=0.0.0.0:9100" in worker["args"]
    assert "--enable-metrics" in pods["beside"]["spec"]["initContainers"][0]["args"]
    assert "--enable-metrics" not in pods["unseen"]["spec"]["initContainers"][0]["args"]


def test_service_and_workers_are_told_of_the_collector_and_of_none_where_none_is_named() -> None:
    (traced,) = [path for path in VALUE_SETS if path.name == "tracing-values.yaml"]
    assert _tracing(traced) == {
        kind: {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.observability.svc:4317",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.05",
        }
        for kind in ("service", "worker")
    }
    assert set(map(len, _tracing(MONITORING).values())) == {0}


def _tracing(values: Path) -> dict[str, dict[str, str]]:
    """Variables of OpenTelemetry, by the name of the container."""
    containers = [
        container
        for kind in ("Deployment", "StatefulSet")
        for one in documents(values, kind)
        for container in one["spec"]["template"]["spec"]["containers"]
        if container["name"] in {"service", "worker"}
    ]
    return {
        container["name"]: {
            variable["name"]: variable["value"] for variable in container["env"] if variable["name"].startswith("OTEL_")
        }
        for container in containers
    }
