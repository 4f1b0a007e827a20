"""Pods: nobody is root, nothing is written outside of volumes, ends leave time, and no secret is readable."""

import re
from pathlib import Path

from tests.chart.helm import KIND, documents, environment, every_value_set, load, pods, pods_of, strings


@every_value_set
def test_no_pod_is_root_or_holds_a_token_of_kubernetes(values: Path) -> None:
    for pod in pods(values):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
    for account in documents(values, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@every_value_set
def test_containers_have_no_privileges_and_a_read_only_root(values: Path) -> None:
    for pod in pods(values):
        for container in pod.containers:
            security = container["securityContext"]
            if container["name"] == "engine" and "add" in security["capabilities"]:
                continue  # given by the values
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


@every_value_set
def test_containers_say_what_they_need_and_images_are_pinned(values: Path) -> None:
    for pod in pods(values):
        for container in pod.containers:
            assert container["resources"]["requests"], pod.name
            assert "memory" in container["resources"]["limits"], pod.name
            tag = container["image"].rpartition(":")[2]
            assert tag
            assert tag != "latest"


@every_value_set
def test_pods_have_longer_to_end_than_their_programs_take(values: Path) -> None:
    for pod in pods_of(values, "service"):
        container = pod.container("service")
        drain_s = float(environment(container).get("RB_DRAIN_GRACE_S", "10"))
        stop_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod.spec["terminationGracePeriodSeconds"] >= stop_s + drain_s + 10
    for pod in pods_of(values, "worker"):
        flags = [flag for flag in pod.container("worker")["args"] if flag.startswith("--drain-grace-s=")]
        drain_s = float(flags[0].partition("=")[2]) if flags else 20.0
        assert pod.spec["terminationGracePeriodSeconds"] >= drain_s + 30


@every_value_set
def test_upgrades_take_no_replica_of_the_service_away_first(values: Path) -> None:
    for deployment in documents(values, "Deployment"):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "service":
            strategy = load(values.read_text()).get("service", {}).get("strategy", "RollingUpdate")
            rolling = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}} if strategy == "RollingUpdate" else {}
            assert deployment["spec"]["strategy"] == {"type": strategy, **rolling}


@every_value_set
def test_engines_outlive_their_workers_and_share_weights_and_models_with_them(values: Path) -> None:
    for pod in pods_of(values, "worker"):
        if "engine" not in {container["name"] for container in pod.containers}:
            continue
        engine, worker = pod.container("engine"), pod.container("worker")
        assert engine in pod.spec["initContainers"]
        assert engine["restartPolicy"] == "Always"
        shared = {(m["name"], m["mountPath"]) for m in worker["volumeMounts"] if m["name"] in {"weights", "models"}}
        assert shared <= {(m["name"], m["mountPath"]) for m in engine["volumeMounts"]}
        port = next(flag for flag in engine["args"] if flag.startswith("--port=")).partition("=")[2]
        assert f"--engine=http://127.0.0.1:{port}" in worker["args"]
        # Whoever reaches SGLang can run code in it.
        assert "--host=127.0.0.1" in engine["args"]
        assert pod.volumes["shm"]["emptyDir"]["medium"] == "Memory"


@every_value_set
def test_gpus_are_asked_for_where_the_engine_runs(values: Path) -> None:
    pools = {pool["name"]: pool for pool in load(values.read_text()).get("workers", [])}
    for pod in pods_of(values, "worker"):
        engine = pools[pod.labels["rollout-buffer/pool"]].get("engine", {})
        source = engine.get("source", "sidecar")
        holder = {"sidecar": "engine", "launch": "worker"}.get(source)
        for container in pod.containers:
            gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
            assert gpus == (engine.get("gpus", 1) if container["name"] == holder else 0)


@every_value_set
def test_the_scheduler_knows_what_weights_take_of_a_nodes_disk(values: Path) -> None:
    for pod in pods_of(values, "worker"):
        asked = {
            container["name"]: container["resources"]["requests"]["ephemeral-storage"]
            for container in pod.containers
            if "ephemeral-storage" in container["resources"]["requests"]
        }
        kept = pod.volumes["weights"].get("emptyDir")
        assert asked == ({"worker": kept["sizeLimit"]} if kept else {})


@every_value_set
def test_workers_that_end_at_once_do_not_count_as_ready(values: Path) -> None:
    for pod in pods_of(values, "worker"):
        if pod.owner["kind"] != "LeaderWorkerSet":  # Which knows no such time.
            assert pod.owner["spec"]["minReadySeconds"] == 30


@every_value_set
def test_drains_wait_for_no_pod_that_is_broken_but_for_servers_of_the_store(values: Path) -> None:
    for budget in documents(values, "PodDisruptionBudget"):
        component = budget["metadata"]["labels"]["app.kubernetes.io/component"]
        expected = None if component in {"store", "shards"} else "AlwaysAllow"
        assert budget["spec"].get("unhealthyPodEvictionPolicy") == expected


@every_value_set
def test_ports_of_collective_updates_are_bounded_unless_they_are_the_nodes(values: Path) -> None:
    pools = {pool["name"]: pool for pool in load(values.read_text()).get("workers", [])}
    for pod in pods_of(values, "worker"):
        collective = pools[pod.labels["rollout-buffer/pool"]].get("collective", {})
        sysctls = pod.spec["securityContext"].get("sysctls", [])
        # Kubernetes refuses the sysctl together with the node's network.
        assert bool(sysctls) == (collective.get("enabled", False) and not collective.get("hostNetwork", False))
        assert pod.spec.get("hostNetwork", False) == collective.get("hostNetwork", False)


BYTES = {"mb": 1 << 20, "gb": 1 << 30, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * BYTES[quantity[-2:]]


@every_value_set
def test_the_store_has_room_beyond_its_data_in_memory_and_on_its_volume(values: Path) -> None:
    for pod in [*pods_of(values, "store"), *pods_of(values, "shards")]:
        server = pod.container("server")
        most = _bytes(environment(server)["MAXMEMORY"])
        assert _bytes(server["resources"]["limits"]["memory"]) >= 1.5 * most
        assert _bytes(pod.volumes["data"]["spec"]["resources"]["requests"]["storage"]) >= 3 * most


@every_value_set
def test_what_is_kept_for_replicas_fits_beside_the_data_in_memory(values: Path) -> None:
    for pod in [*pods_of(values, "store"), *pods_of(values, "shards")]:
        server = pod.container("server")
        given = environment(server)
        if "HOSTS" in given:
            kept = _bytes(given["REPL_BACKLOG"]) + _bytes(given["REPLICA_BUFFER_LIMIT"].split()[0])
            assert _bytes(given["MAXMEMORY"]) + kept <= _bytes(server["resources"]["limits"]["memory"])


@every_value_set
def test_servers_of_a_replicated_store_are_on_different_nodes(values: Path) -> None:
    given = load(values.read_text()).get("store", {})
    for pod in [*pods_of(values, "store"), *pods_of(values, "shards")]:
        spread = {rule["topologyKey"]: rule for rule in pod.spec.get("topologySpreadConstraints", [])}
        servers = pod.owner["spec"]["replicas"]
        assert bool(spread) == (servers > 1)
        if spread:
            nodes = spread["kubernetes.io/hostname"]
            # Each server of a cluster has a node, or a primary may be lost with its replica.
            mode, least = ("cluster", servers) if pod in pods_of(values, "shards") else ("sentinel", 3)
            strict = given.get(mode, {}).get("spreadNodes", True)
            wanted = ("DoNotSchedule", least) if strict else ("ScheduleAnyway", None)
            assert (nodes["whenUnsatisfiable"], nodes.get("minDomains")) == wanted
            assert nodes["maxSkew"] == 1
            assert nodes["labelSelector"]["matchLabels"] == pod.owner["spec"]["selector"]["matchLabels"]


@every_value_set
def test_one_server_of_a_cluster_is_drained_at_a_time_and_none_restarted_for_the_others(values: Path) -> None:
    for pod in pods_of(values, "shards"):
        (budget,) = [
            budget
            for budget in documents(values, "PodDisruptionBudget")
            if budget["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        ]
        assert budget["spec"]["maxUnavailable"] == 1
        server = pod.container("server")
        assert all("tcpSocket" in server[probe] for probe in ("startupProbe", "livenessProbe"))


def test_kind_has_a_node_for_each_server_of_its_store() -> None:
    nodes = [node["role"] for node in load((KIND.parent / "cluster.yaml").read_text())["nodes"]]
    (pod,) = pods_of(KIND, "store")
    assert nodes.count("worker") >= pod.owner["spec"]["replicas"]


@every_value_set
def test_the_log_of_helm_test_can_be_read_after_it(values: Path) -> None:
    (pod,) = pods_of(values, "test")
    assert pod.metadata["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"


@every_value_set
def test_rpc_processes_fit_into_the_memory_of_the_service(values: Path) -> None:
    for pod in pods_of(values, "service"):
        container = pod.container("service")
        given = environment(container)
        held = int(given.get("RB_BLOCKED_BYTES", 256 << 20)) + int(given.get("RB_RECENT_BYTES", 128 << 20))
        if values.name == "settings-values.yaml":
            continue  # its blocked_bytes is the largest number that there is
        assert _bytes(container["resources"]["limits"]["memory"]) >= int(given["RB_RPC_PROCESSES"]) * held


@every_value_set
def test_no_secret_is_made_or_readable(values: Path) -> None:
    assert documents(values, "Secret") == []
    for document in documents(values, "ConfigMap"):
        assert not any("://" in text and "@" in text for text in strings(document["data"]))
    for pod in pods(values):
        for container in pod.containers:
            secrets = {v["name"] for v in container.get("env", []) if "secretKeyRef" in v.get("valueFrom", {})}
            for argument in [*container.get("args", []), *container.get("command", [])]:
                assert not any(f"$({name})" in argument for name in secrets), "arguments are readable in /proc"
            for variable in container.get("env", []):
                if re.search(r"://[^@]*:[^@]*@", variable.get("value", "")):
                    assert "://:$(STORE_PASSWORD)@" in variable["value"]
