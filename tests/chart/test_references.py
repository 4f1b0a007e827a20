"""Tests that what objects say about each other holds: selectors, ports, volumes, names of ConfigMaps and Secrets,
targets.
"""

import re
from pathlib import Path
from typing import Any

from tests.chart.helm import (
    ROOT,
    VALUE_SETS,
    Document,
    Pod,
    documents,
    environment,
    every_value_set,
    load,
    pods,
    pods_of,
    strings,
)


def _selected(values: Path, selector: dict[str, str]) -> list[Pod]:
    return [pod for pod in pods(values) if selector.items() <= pod.labels.items()]


def _port_names(pod: Pod) -> set[str]:
    return {port["name"] for container in pod.containers for port in container.get("ports", [])}


@every_value_set
def test_names_are_unique_and_short_enough_for_a_label(values: Path) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in documents(values)]

    assert len(set(names)) == len(names)
    # A StatefulSet's pods carry its name and a hash as a label of at most 63 characters.
    assert all(len(name) <= 63 - 11 for _, name in names)


@every_value_set
def test_controllers_select_their_own_pods_and_no_others(values: Path) -> None:
    for controller in documents(values, "Deployment", "StatefulSet"):
        (pod,) = _selected(values, controller["spec"]["selector"]["matchLabels"])
        assert pod.owner is controller


@every_value_set
def test_labels_of_pods_name_no_version(values: Path) -> None:
    # It would restart the store and every engine with each new version of the chart.
    for controller in documents(values, "Deployment", "StatefulSet"):
        labels = controller["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= controller["spec"]["selector"]["matchLabels"].items()
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


def test_the_store_can_be_restarted_by_the_command_in_the_docs() -> None:
    (command,) = re.findall(r"kubectl delete pod --selector (\S+)", (ROOT / "docs/deployment.md").read_text())
    wanted = dict(label.split("=") for label in command.split(","))
    for values in VALUE_SETS:
        selected = _selected(values, wanted)
        assert selected == pods_of(values, "store")
        for pod in selected:
            # They wait for each other.
            assert pod.owner["spec"]["podManagementPolicy"] == "Parallel"
            assert "data" in {claim["metadata"]["name"] for claim in pod.owner["spec"]["volumeClaimTemplates"]}


@every_value_set
def test_services_reach_pods_at_ports_that_these_have(values: Path) -> None:
    for service in documents(values, "Service"):
        selected = _selected(values, service["spec"]["selector"])
        assert len(selected) == 1, service["metadata"]["name"]
        for port in service["spec"].get("ports", []):
            assert port["targetPort"] in _port_names(selected[0])


@every_value_set
def test_stateful_sets_have_the_service_that_they_name(values: Path) -> None:
    services = {service["metadata"]["name"]: service for service in documents(values, "Service")}
    for stateful in documents(values, "StatefulSet"):
        service = services[stateful["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == stateful["spec"]["selector"]["matchLabels"]


@every_value_set
def test_budgets_and_autoscalers_have_targets(values: Path) -> None:
    controllers = {(document["kind"], document["metadata"]["name"]): document for document in documents(values)}
    for budget in documents(values, "PodDisruptionBudget"):
        assert len(_selected(values, budget["spec"]["selector"]["matchLabels"])) == 1
    for scaler in documents(values, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        controller = controllers[target["kind"], target["name"]]
        assert "replicas" not in controller["spec"], "an upgrade would undo what the autoscaler did"
        assert scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]
        if any(metric["type"] == "Resource" for metric in scaler["spec"]["metrics"]):
            for container in controller["spec"]["template"]["spec"]["containers"]:
                assert "cpu" in container["resources"]["requests"]


@every_value_set
def test_probes_ask_ports_that_the_container_has(values: Path) -> None:
    for pod in pods(values):
        for container in pod.containers:
            names = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                action = container.get(probe, {})
                for kind in ("httpGet", "tcpSocket"):
                    assert action.get(kind, {}).get("port") in names | {None}, (pod.name, probe)


@every_value_set
def test_the_service_is_probed_at_paths_that_its_page_has(values: Path) -> None:
    for pod in pods_of(values, "service"):
        container = pod.container("service")
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        # /readyz names the reason after 5 s.
        assert container["readinessProbe"]["timeoutSeconds"] > 5


@every_value_set
def test_mounts_have_volumes_and_volumes_mounts(values: Path) -> None:
    for pod in pods(values):
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == set(pod.volumes), pod.name
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths), f"{pod.name}: two mounts at one path"


@every_value_set
def test_secrets_and_config_maps_are_made_here_or_named_by_the_values(values: Path) -> None:
    made = {("ConfigMap", document["metadata"]["name"]) for document in documents(values, "ConfigMap")}
    made |= {("Secret", document["spec"]["secretName"]) for document in documents(values, "Certificate")}
    declared = set(strings(load(values.read_text())))
    for document in documents(values):
        for kind, name in _references(document):
            assert (kind, name) in made or name in declared, f"{document['kind']}: no {kind} {name}"


def _references(node: Any) -> list[tuple[str, str]]:
    if isinstance(node, list):
        return [found for item in node for found in _references(item)]
    if not isinstance(node, dict):
        return []
    found = [pair for value in node.values() for pair in _references(value)]
    if "secret" in node and "secretName" in (node["secret"] or {}):
        found.append(("Secret", node["secret"]["secretName"]))
    for key, kind in (("secretKeyRef", "Secret"), ("configMap", "ConfigMap"), ("credentials", "Secret")):
        if isinstance(node.get(key), dict):
            found.append((kind, node[key]["name"]))
    return found


@every_value_set
def test_service_monitors_scrape_a_port_of_one_service(values: Path) -> None:
    for monitor in documents(values, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [s for s in documents(values, "Service") if wanted <= s["metadata"]["labels"].items()]
        assert len(services) == 1
        ports = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@every_value_set
def test_network_policies_let_every_client_in(values: Path) -> None:
    policies = documents(values, "NetworkPolicy")
    if load(values.read_text()).get("networkPolicy", {}).get("enabled", True):
        assert policies
    for policy in policies:
        (pod,) = _selected(values, policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", ()):
                assert isinstance(port["port"], int) or port["port"] in _port_names(pod)
    clients = {
        "service": [*pods_of(values, "worker"), *pods_of(values, "test")],
        "store": pods_of(values, "service"),
        "shards": [*pods_of(values, "service"), *pods_of(values, "shards")],
    }
    for component, port in (("service", "grpc"), ("store", "valkey"), ("shards", "valkey")):
        for policy in _policies_of(policies, component):
            rules = [rule for rule in policy["spec"]["ingress"] if {"port": port} in rule["ports"]]
            peers = [peer["podSelector"] for rule in rules for peer in rule["from"] if "podSelector" in peer]
            for client in clients[component]:
                assert any(peer.get("matchLabels", {}).items() <= client.labels.items() for peer in peers), client.name


@every_value_set
def test_the_stores_port_is_open_to_clients_only_where_payloads_go_directly(values: Path) -> None:
    given = load(values.read_text())
    direct = given.get("service", {}).get("directPayloads", {}).get("enabled", False)
    trainers = given.get("networkPolicy", {}).get("trainers") or [{"podSelector": {}}]
    # Payloads lie with the store, or apart from it.
    reached = {"store": direct and "payloads" not in given.get("store", {}), "shards": direct}
    policies = [(c, p) for c in reached for p in _policies_of(documents(values, "NetworkPolicy"), c)]
    for component, policy in policies:
        rules = [rule for rule in policy["spec"]["ingress"] if {"port": "valkey"} in rule["ports"]]
        peers = [peer for rule in rules for peer in rule["from"]]
        selected = [peer["podSelector"].get("matchLabels", {}) for peer in peers if "podSelector" in peer]
        for worker in pods_of(values, "worker"):
            assert any(labels.items() <= worker.labels.items() for labels in selected) is reached[component]
        assert all(trainer in peers for trainer in trainers) is reached[component]
        if component == "store":
            assert all(rule["ports"] == [{"port": "valkey"}] for rule in rules[1:]), "Sentinels are for the service"


@every_value_set
def test_the_bus_of_a_cluster_is_open_to_its_servers_alone(values: Path) -> None:
    for policy in _policies_of(documents(values, "NetworkPolicy"), "shards"):
        (shards,) = pods_of(values, "shards")
        (rule,) = [rule for rule in policy["spec"]["ingress"] if {"port": "bus"} in rule["ports"]]
        assert rule["from"] == [{"podSelector": {"matchLabels": shards.labels}}]


@every_value_set
def test_the_service_offers_direct_payloads_where_the_store_can_be_reached(values: Path) -> None:
    direct = load(values.read_text()).get("service", {}).get("directPayloads", {})
    (service,) = pods_of(values, "service")
    given = environment(service.container("service"))
    offers = {True: "true", False: None} if direct.get("enabled") else {False: "false"}
    assert given.get("RB_DIRECT_PAYLOADS") == offers[direct.get("plainText", False)]
    assert given.get("RB_PAYLOAD_ADDRESS", "") == direct.get("address", "")
    assert {"RB_PAYLOAD_WRITER", "RB_PAYLOAD_READER"} <= set(given) or "users" not in direct


def _policies_of(policies: list[Document], component: str) -> list[Document]:
    return [p for p in policies if p["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component]


@every_value_set
def test_clients_and_the_service_know_each_other_by_the_names_of_services(values: Path) -> None:
    services = {document["metadata"]["name"]: document for document in documents(values, "Service")}
    for pod in [*pods_of(values, "worker"), *pods_of(values, "test")]:
        host, _, port = environment(pod.spec["containers"][0])["RB_ADDRESS"].rpartition(":")
        name, namespace, _ = host.split(".")
        assert namespace == "training"
        assert int(port) in {port["port"] for port in services[name]["spec"]["ports"]}
    for stateful in documents(values, "StatefulSet"):
        if stateful["metadata"]["name"].endswith("-store"):
            (service,) = pods_of(values, "service")
            assert stateful["metadata"]["name"] in environment(service.container("service"))["RB_STORE"]
        if stateful["metadata"]["name"].endswith("-shards"):
            (service,) = pods_of(values, "service")
            (shards,) = pods_of(values, "shards")
            given = environment(service.container("service"))
            named = given.get("RB_PAYLOAD_STORE", given["RB_STORE"]).rpartition("@")[2].removeprefix("redis+cluster://")
            hosts = environment(shards.container("server"))["HOSTS"].split()
            assert named.split(",") == [f"{host}:6379" for host in hosts]
            assert [host.split(".")[0] for host in hosts] == [
                f"{stateful['metadata']['name']}-{place}" for place in range(stateful["spec"]["replicas"])
            ]


@every_value_set
def test_certificates_hold_the_names_that_clients_use(values: Path) -> None:
    for certificate in documents(values, "Certificate"):
        if "server auth" in certificate["spec"]["usages"]:
            for pod in pods_of(values, "worker"):
                host = environment(pod.container("worker"))["RB_ADDRESS"].rpartition(":")[0]
                assert host in certificate["spec"]["dnsNames"]
