"""Every query of every panel finds data, and the alerts fire, on a real Prometheus that scrapes a real loaded service.

One story, because engines count as silent after a minute only: a run at work and faults beside it, then a store that is
full, and a shard, a store and a service that are gone. Payloads lie on a cluster without replicas.
"""

import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from buffer_service.security.roles import Role
from tests.dashboards.faults import BlockedPush, Repeated, connected, full, hold, lag, stall, stand_still, write
from tests.dashboards.loop import RUN, Trainer, stage, worker
from tests.dashboards.prometheus import NAMESPACE, WINDOW, Prometheus, free_port, prometheus
from tests.dashboards.sglang import sglang_metrics
from tests.security.guarded import add_token
from tests.support.service import running_service
from tests.support.store_cluster import store_cluster
from tests.support.store_server import store_server

CHART = Path(__file__).parents[2] / "deploy/helm/rollout-buffer"
ALERTS = sorted((CHART / "files/alerts").glob("*.yaml"))
DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
STORE_BYTES = 256 << 20
TIMEOUT_S = 150.0
POLL_S = 1.0

OF_A_FULL_STORE = {"RolloutBufferStoreErrors", "RolloutBufferStoreNearMemory", "RolloutBufferRpcErrors"}
NOT_PROVOKED = {
    "RolloutBufferGroupsLost": "the store would have to lose single keys",
    "RolloutBufferLedgerOutOfBalance": "it takes a defect",
    "RolloutBufferLengthBias": "takes hundreds of groups that a gate chooses among",
    "RolloutBufferRunsUnread": "a service of another version would have to use the same store",
    "RolloutBufferTargetOutOfReach": "takes a controller that has lowered all it may, over many publishes",
    "RolloutBufferPredictionOff": "takes a loop that is unlike its closed form for several publishes",
}
"""Their expressions are evaluated here, and their unit tests fire them (tests/monitoring)."""
NEVER_OF_A_GOOD_RUN = {
    "RolloutBufferEngineQuarantined",
    "RolloutBufferEngineSilent",
    "RolloutBufferEngineLag",
    "RolloutBufferRunPaused",
    "RolloutBufferLedgerOutOfBalance",
    "RolloutBufferGroupsLost",
    "RolloutBufferAcceptanceLow",
    "RolloutBufferTasksFail",
    "RolloutBufferLeasesExpire",
}
"""Alerts beside two that may fire: with windows of seconds, a worker that takes long to start is no progress and no
engine.
"""
_ON_THE_WAY = {
    "RolloutBufferSecurityFileBroken",
    "RolloutBufferPayloadShardDown",
    "RolloutBufferStoreDown",
    "RolloutBufferServiceDown",
}


def substituted(expression: str) -> str:
    """Expression as Grafana sends it, with the run at work chosen."""
    values = {"$__rate_interval": WINDOW, "$namespace": NAMESPACE, "$run": RUN}
    for variable, value in values.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


def queries() -> dict[str, str]:
    """Expression by dashboard, panel and legend."""
    found = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = substituted(target["expr"])
    assert found
    return found


def until(met: Callable[[], Collection[str]], what: str) -> None:
    """Wait until nothing is left. `met` says what is."""
    deadline = time.monotonic() + TIMEOUT_S
    while left := met():
        assert time.monotonic() < deadline, f"{what}: {sorted(left)}"
        time.sleep(POLL_S)


def unanswered(seen: Prometheus, asked: dict[str, str]) -> set[str]:
    """Queries without any data so far; those that have some are taken out of `asked`."""
    for name, expression in list(asked.items()):
        if seen.values(expression):
            del asked[name]
    return set(asked)


def rules_of(seen: Prometheus) -> dict[str, dict[str, Any]]:
    return {rule["name"]: rule for rule in seen.rules()}


@pytest.mark.timeout(600)
def test_every_panel_has_data_and_every_alert_is_alive(tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens.jsonl"
    tokens = {role: add_token(tokens_file, f"of-{role}", role, "*") for role in (Role.ADMIN, Role.READER, Role.WORKER)}
    worker_token = tmp_path / "worker.token"
    worker_token.write_text(tokens[Role.WORKER])
    metrics = f"127.0.0.1:{free_port()}"
    with (
        store_server("--maxmemory", str(STORE_BYTES), "--maxmemory-policy", "noeviction") as store,
        store_cluster(replicas=0) as cluster,
        running_service(tmp_path, store=store.url, payload_store=cluster.url, tokens_file=tokens_file) as service,
        sglang_metrics() as sglang,
        prometheus(
            tmp_path / "prometheus",
            service.admin.removeprefix("http://"),
            tokens[Role.READER],
            ALERTS,
            others=[sglang, metrics],
        ) as seen,
    ):
        rpc, stranger = connected(service.address, tokens[Role.ADMIN]), connected(service.address, "")
        trainer = Trainer(service.address, tokens[Role.ADMIN])
        trainer.start()
        repeated = Repeated(rpc, stranger)
        with (
            worker(service.address, worker_token, tmp_path, metrics),
            stage(service.address, tokens[Role.ADMIN]),
        ):
            stand_still(rpc)
            hold(rpc)
            lag(rpc)
            stall(rpc)
            repeated.start()
            blocked = BlockedPush(rpc)
            until(lambda: {"it"} - {"it" for v in seen.values("rollout_buffer_blocked_pushes") if v}, "a blocked push")
            blocked.end()

            every = set(rules_of(seen))
            asked, later = queries(), {"service: Errors: {{kind}}"}
            until(lambda: unanswered(seen, asked) - later, "panels without data")
            alerts = {name for name, rule in rules_of(seen).items() if rule["type"] == "alerting"}
            now = alerts - OF_A_FULL_STORE - _ON_THE_WAY - set(NOT_PROVOKED)
            until(lambda: now - seen.firing(), "alerts that do not fire")
            assert RUN in seen.labels(f'label_values(rollout_buffer_next_step{{namespace=~"{NAMESPACE}"}}, run)')
            assert seen.labels("label_values(rollout_buffer_blocked_pushes, namespace)") == {NAMESPACE}
            assert not NEVER_OF_A_GOOD_RUN & seen.firing(run=RUN)

            repeated.end()
            trainer.end()
        with tokens_file.open("a") as file:
            file.write("this is no entry\n")
        with full(store, STORE_BYTES):

            def unfired() -> Collection[str]:
                write(rpc)
                return OF_A_FULL_STORE - seen.firing()

            until(unfired, "alerts of a full store that do not fire")
        until(lambda: unanswered(seen, asked), "panels without data")
        until(lambda: {"RolloutBufferSecurityFileBroken"} - seen.firing(), "alerts that do not fire")
        assert {rule["health"] for rule in rules_of(seen).values()} == {"ok"}
        cluster.kill(0)
        until(lambda: {"RolloutBufferPayloadShardDown"} - seen.firing(), "alerts that do not fire")
        store.kill()
        until(lambda: {"RolloutBufferStoreDown"} - seen.firing(), "alerts that do not fire")
        service.stop()
        until(lambda: {"RolloutBufferServiceDown"} - seen.firing(), "alerts that do not fire")
        assert set(rules_of(seen)) == every
        assert {rule["health"] for rule in rules_of(seen).values()} == {"ok"}
        assert alerts - seen.firing() == set(NOT_PROVOKED) - seen.firing()
