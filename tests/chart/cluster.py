"""A stand-in for a cluster: as much of the Kubernetes API as the chart's `lookup` asks for, with a test's objects."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.chart.helm import CHART, NAMESPACE, RELEASE, Document, helm

KINDS = {
    "v1": {"ConfigMap": "configmaps", "Pod": "pods", "Service": "services", "ServiceAccount": "serviceaccounts"},
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}
"""Objects that the chart makes, by API version: kinds and their names in paths."""


def thing(kind: str, name: str, **content: object) -> Document:
    """An object of the release."""
    (version,) = (version for version, kinds in KINDS.items() if kind in kinds)
    release = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": release}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


ROOT_CA = thing("ConfigMap", "kube-root-ca.crt", data={"ca.crt": "x"})
"""Kubernetes puts it into every namespace."""


def render_in_cluster(folder: Path, values: str, *objects: Document, major: int = 4) -> str:
    """Return what Helm would send to a cluster with these objects."""
    path = folder / "values.yaml"
    path.write_text(values)
    with _api({_path(each): each for each in (ROOT_CA, *objects)}) as address:
        config = folder / "kubeconfig"
        config.write_text(json.dumps(_kubeconfig(address)))
        asked = ("--namespace", NAMESPACE, "--values", path, "--dry-run=server", "--disable-openapi-validation")
        done = helm(major, "template", RELEASE, CHART, *asked, "--kubeconfig", config)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _path(each: Document) -> str:
    version = each["apiVersion"]
    root = "/api" if version == "v1" else "/apis"
    return f"{root}/{version}/namespaces/{NAMESPACE}/{KINDS[version][each['kind']]}/{each['metadata']['name']}"


@contextmanager
def _api(objects: dict[str, Document]) -> Iterator[str]:
    answers: dict[str, Document] = {"/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}, **objects}
    groups = [version for version in KINDS if "/" in version]
    answers["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(version) for version in groups]}
    for version, kinds in KINDS.items():
        resources = [{"name": plural, "kind": kind, "namespaced": True} for kind, plural in kinds.items()]
        root = "/api" if version == "v1" else "/apis"
        answers[f"{root}/{version}"] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or status).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join(timeout=10)


def _group(version: str) -> Document:
    served = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [served], "preferredVersion": served}


def _kubeconfig(address: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": address}}],
        "users": [{"name": "test", "user": {}}],
    }
