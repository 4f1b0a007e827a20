"""Trainers outside of the cluster reach the gRPC port of the Service, and nothing else of it."""

import pytest

from tests.chart.helm import VALUE_SETS, documents

SETS = {path.name.removesuffix("-values.yaml"): path for path in VALUE_SETS}


def _grpc(name: str) -> tuple[str, int]:
    """Name of the Service, and its gRPC port."""
    (service,) = [
        one
        for one in documents(SETS[name], "Service")
        if one["metadata"]["labels"]["app.kubernetes.io/component"] == "service"
    ]
    (port,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"]
    return service["metadata"]["name"], port


def test_ingress_leads_to_grpc_alone() -> None:
    (ingress,) = documents(SETS["outside-ingress"], "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": _grpc("outside-ingress")[0], "port": {"name": "grpc"}}
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "outside-tls"}]
    assert ingress["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/backend-protocol": "GRPCS"}


def test_route_leads_to_grpc_alone() -> None:
    (route,) = documents(SETS["outside-route"], "GRPCRoute")
    name, port = _grpc("outside-route")
    assert route["spec"]["rules"] == [{"backendRefs": [{"name": name, "port": port}]}]
    assert route["spec"]["hostnames"] == ["rb.example.org"]
    assert route["spec"]["parentRefs"] == [{"name": "outer", "namespace": "gateways", "sectionName": "https"}]


@pytest.mark.parametrize("name", [name for name in SETS if not name.startswith("outside")])
def test_nobody_outside_reaches_the_service_unasked(name: str) -> None:
    assert documents(SETS[name], "Ingress", "GRPCRoute") == []
