"""The admin page: probes, metrics, JSON."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

from rollout_buffer.v1 import runs_pb2, weights_pb2
from tests.support.processes import children, command
from tests.support.rpc import TIMEOUT_S, VERSION_0, Rpc, connect, failure, make_group, make_task
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import store_server


def fetched(service: ServiceProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(service.admin + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(service: ServiceProcess, path: str, status: int) -> str:
    deadline = time.monotonic() + 15
    while (answer := fetched(service, path))[0] != status:
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer[1]


def test_a_service_that_serves_is_alive_and_ready(service: ServiceProcess) -> None:
    assert fetched(service, "/livez") == (200, "ok\n")
    assert fetched(service, "/readyz") == (200, "ok\n")


def test_the_metrics_of_a_run_are_its_ledgers(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=3, max_staleness=4)
    run.submit([make_task() for _ in range(3)])
    run.lease(max_tasks=2)
    run.fill(4)
    run.pull(0)
    run.publish(2, commit_through_step=0)
    report = weights_pb2.EngineReport(
        engine_id="e", worker_id="w", state=weights_pb2.ENGINE_STATE_READY, loaded=VERSION_0, reloads=3, errors=1
    )
    for count, time_ms in ((4, 1_000), (6, 2_500)):
        load = weights_pb2.ReloadPhaseTime(phase=weights_pb2.RELOAD_PHASE_LOAD, count=count, time_ms=time_ms)
        of_a_newer_worker = weights_pb2.ReloadPhaseTime(phase=99, count=1, time_ms=1)  # type: ignore[arg-type]
        del report.reload_phases[:]
        report.reload_phases.extend([load, of_a_newer_worker])
        rpc.weights.ReportEngine(weights_pb2.ReportEngineRequest(run=run.ref, report=report), timeout=TIMEOUT_S)
    state = run.get()

    def metric(name: str, **labels: str) -> float:
        return service.metric(f"rollout_buffer_{name}", run=run.run_id, **labels)

    assert metric("ledger_groups", disposition="accepted") == 4
    assert metric("ledger_groups", disposition="trained") == 2
    assert metric("ledger_groups", disposition="dropped_overflow") == 1
    assert metric("ledger_bytes", disposition="accepted") == state.groups.accepted.bytes
    assert metric("ledger_groups") == 2 * 4, "accepted, and the dispositions that sum up to it"
    assert metric("tasks", state="leased") == 2
    assert metric("tasks", state="submitted") == state.tasks.submitted
    assert metric("queue_groups") == 1
    assert metric("queue_limit_groups") == 3
    assert metric("published_version") == 2
    assert metric("staleness_limit_versions") == 4
    assert metric("committed_steps") == 1
    assert metric("engines", state="ready") == 1
    assert metric("engine_lag_max_versions") == 2
    assert metric("engine_reloads_total") == 3
    assert metric("reloads_total", phase="load") == metric("reloads_total") == 6 - 4
    assert metric("reload_seconds_total", phase="load") == 1.5
    assert metric("assembled_groups_total") == 2


def test_environments_and_the_filter_have_metrics_of_their_own(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=8, filter_equal_rewards=True, quota_groups=40)
    run.push([make_group(f"x{i}", environment="math", rewards=(0.0, 1.0)) for i in range(3)])
    run.push([make_group(f"y{i}", environment="code") for i in range(4)])
    run.pull(0)
    state = run.get()

    def metric(name: str, **labels: str) -> float:
        return service.metric(f"rollout_buffer_{name}", run=run.run_id, **labels)

    assert metric("environment_groups", environment="math", disposition="delivered") == 2
    assert metric("environment_groups", environment="math", disposition="queued") == 1
    assert metric("environment_groups", environment="code", disposition="filtered") == 4
    filtered = {entry.environment: entry.groups.filtered.bytes for entry in state.environments}
    assert metric("environment_bytes", environment="code", disposition="filtered") == filtered["code"] > 0
    assert metric("filtered_groups_total", reason="equal_rewards") == 4
    assert metric("recent_acceptance_ratio") == state.statistics.recent_acceptance_ppm / 1_000_000 < 1
    assert metric("filter_starves") == 0
    assert metric("quota_used_groups") == 3
    assert metric("quota_limit_groups") == 40
    listed = {item["run_id"]: item for item in json.loads(fetched(service, "/api/runs")[1])}[run.run_id]
    assert listed["queued_by_environment"] == {"code": 0, "math": 1}
    assert listed["filtered_groups"] == {"equal_rewards": 4, "response_tokens": 0, "mean_reward": 0}
    assert listed["filter_starves"] is False
    whole = json.loads(fetched(service, f"/api/runs/{run.run_id}")[1])
    assert whole["environments"]["math"]["accepted"]["groups"] == 3


def test_a_starving_filter_and_a_held_run_raise_alarms(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, filter_equal_rewards=True, min_acceptance_milli=900)
    run.push([make_group(f"x{i}") for i in range(16)])
    rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S)
    rpc.runs.DrainRun(runs_pb2.DrainRunRequest(run=run.ref), timeout=TIMEOUT_S)
    assert service.metric("rollout_buffer_filter_starves", run=run.run_id) == 1
    assert service.metric("rollout_buffer_paused", run=run.run_id, reason="operator") == 1
    assert service.metric("rollout_buffer_draining", run=run.run_id) == 1
    listed = {item["run_id"]: item for item in json.loads(fetched(service, "/api/runs")[1])}[run.run_id]
    assert (listed["paused"], listed["draining"], listed["filter_starves"]) == ("operator", True, True)


def test_the_metrics_of_rpcs_count_methods_and_codes(service: ServiceProcess, rpc: Rpc) -> None:
    before = service.metric("rollout_buffer_rpcs_total", method="PushGroups", code="OK")
    sent_before = service.metric("rollout_buffer_rpc_sent_bytes_total", method="PullBatch")
    run = rpc.create(batch_groups=1)
    group = make_group("x0")
    run.push([group])
    run.pull(0)
    assert service.metric("rollout_buffer_rpcs_total", method="PushGroups", code="OK") == before + 1
    assert service.metric("rollout_buffer_pushed_groups_total", outcome="queued") >= 1
    sent = service.metric("rollout_buffer_rpc_sent_bytes_total", method="PullBatch") - sent_before
    assert group.ByteSize() < sent < group.ByteSize() + 100
    assert service.metric("rollout_buffer_rpc_seconds_count", method="CreateRun") >= 1
    assert service.metric("rollout_buffer_rpcs_total", method="GetRun", code="NOT_FOUND") == 0
    missing = type(run)(rpc, "missing")
    assert failure(missing.get).reason == "unknown_run"
    assert service.metric("rollout_buffer_rpcs_total", method="GetRun", code="NOT_FOUND") == 1


def test_the_index_and_the_runs_are_json(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    run.submit([make_task()])
    index = json.loads(fetched(service, "/api")[1])
    assert index["address"] == service.address
    assert f"/api/runs/{run.run_id}" in index["runs"]
    listed = {item["run_id"]: item for item in json.loads(fetched(service, "/api/runs")[1])}
    assert listed[run.run_id]["pending_tasks"] == 1
    assert listed[run.run_id]["waits_on"] == "workers: no worker holds a lease"
    whole = json.loads(fetched(service, f"/api/runs/{run.run_id}")[1])
    assert whole["policy"]["batch_groups"] == 2
    assert whole["groups_balanced"]
    assert whole["tasks_balanced"]
    assert whole["estimate"]["predicted"]["staleness"] is None
    assert whole["estimate"]["unknown"][0]["reason"].startswith("fewer than 2 publishes")


def test_a_run_that_is_not_there_is_a_404_with_its_reason(service: ServiceProcess) -> None:
    status, body = fetched(service, "/api/runs/nobody")
    assert (status, json.loads(body)["reason"]) == (404, "unknown_run")


def test_it_is_not_ready_while_an_rpc_process_is_missing(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        (pid,) = [pid for pid in children(service.pid) if "buffer_service.app" in command(pid)]
        os.kill(pid, signal.SIGKILL)
        assert until(service, "/readyz", 503) == "not every rpc process is up\n"
        until(service, "/readyz", 200)


def test_it_is_not_ready_while_the_store_is_away_but_alive(tmp_path: Path) -> None:
    with store_server() as store, running_service(tmp_path, store=store.url) as service:
        connect(service.address).channel.close()
        store.kill()
        assert "does not answer" in until(service, "/readyz", 503)
        assert fetched(service, "/livez")[0] == 200
        assert service.metric("rollout_buffer_store_up") == 0, "and a scrape says so"
        store.start()
        until(service, "/readyz", 200)
