"""Autoscalers ask for metrics that the service has and that the rules for prometheus-adapter serve."""

import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from buffer_service.admin.metrics.runs import RunCollector
from buffer_service.observability.metrics import RpcMetrics
from tests.chart.helm import CHART, VALUE_SETS, Document, documents, load

(KEDA,) = [path for path in VALUE_SETS if path.name == "keda-values.yaml"]
ADAPTER = load((CHART / "files/prometheus-adapter.yaml").read_text())["rules"]


def _asked(kind: str) -> Iterator[Document]:
    for values in VALUE_SETS:
        for scaler in documents(values, "HorizontalPodAutoscaler"):
            for metric in scaler["spec"]["metrics"]:
                if metric["type"] == kind:
                    yield metric[kind.lower()]["metric"]


def _served(rules: list[Document], name: str) -> list[Document]:
    """Rules whose series have this name."""
    return [rule for rule in rules if re.search(re.findall('__name__=~"([^"]+)"', rule["seriesQuery"])[0], name)]


@pytest.mark.parametrize(("kind", "rules"), [("Pods", ADAPTER["custom"]), ("External", ADAPTER["external"])])
def test_what_autoscalers_ask_for_is_served_once_and_exists(kind: str, rules: list[Document]) -> None:
    registry = CollectorRegistry()
    RpcMetrics(registry)
    registry.register(RunCollector([]))
    known = {family.name for family in registry.collect() if family.type == "gauge"}
    names = {metric["name"] for metric in _asked(kind)}
    assert names
    for name in names:
        assert name in known
        assert len(_served(rules, name)) == 1


def test_labels_by_which_autoscalers_choose_are_kept_by_the_rules() -> None:
    for metric in _asked("External"):
        (rule,) = _served(ADAPTER["external"], metric["name"])
        kept = set(re.findall(r"by \(([^)]*)\)", rule["metricsQuery"])[0].split(", "))
        assert set(metric["selector"]["matchLabels"]) <= kept
        # Every replica of the service says the same of a run.
        assert rule["metricsQuery"].startswith("max(")


def test_keda_asks_the_service_as_the_worker_would() -> None:
    (scaled,) = documents(KEDA, "ScaledObject")
    (pool,) = [one for one in documents(KEDA, "StatefulSet") if one["metadata"]["name"].endswith("-math")]
    assert scaled["spec"]["scaleTargetRef"] == {
        "apiVersion": pool["apiVersion"],
        "kind": pool["kind"],
        "name": pool["metadata"]["name"],
    }
    (trigger,) = scaled["spec"]["triggers"]
    (worker,) = pool["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one for one in worker["env"]}
    metadata = trigger["metadata"]
    assert metadata["scalerAddress"] == variables["RB_ADDRESS"]["value"]
    assert f"--run={metadata['run']}" in worker["args"]
    token = variables[metadata["tokenFromEnv"]]["valueFrom"]["secretKeyRef"]
    assert token == {"name": "math-token", "key": "token"}
    # The service takes these names and no other: ScalerServicer.
    assert metadata.keys() == {"scalerAddress", "run", "groupsPerWorker", "tokenFromEnv", "enableTLS"}
    (authentication,) = documents(KEDA, "TriggerAuthentication")
    assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
    given = {one["parameter"]: one["key"] for one in authentication["spec"]["secretTargetRef"]}
    assert given == {"caCert": "ca.crt", "tlsClientCert": "tls.crt", "tlsClientKey": "tls.key"}
    assert "replicas" not in pool["spec"]
