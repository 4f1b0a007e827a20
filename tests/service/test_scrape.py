"""/metrics while the store is slow or gone, and what it says of the store and of calls of it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from buffer_service.admin.reading import READ_S
from buffer_service.store.keys import SCHEMA_VERSION
from tests.support.rpc import connect, failure, make_group
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server

SLACK_S = 15.0
"""Slack for the answer itself, on a busy machine; a call of the store that nobody bounds lasts 30 s."""


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with store_server("--maxmemory", "100mb") as running:
        yield running


@pytest.fixture
def service(tmp_path: Path, store: StoreServer) -> Iterator[ServiceProcess]:
    with running_service(tmp_path, store=store.url, drain_grace_s=1) as service:
        yield service


def scraped(service: ServiceProcess) -> dict[str, float]:
    """Sums of the samples of each name, without those that a scrape lacks."""
    with urllib.request.urlopen(f"{service.admin}/metrics", timeout=READ_S + SLACK_S) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            name = sample.name.removeprefix("rollout_buffer_")
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def test_a_scrape_tells_of_the_store(service: ServiceProcess) -> None:
    seen = scraped(service)
    assert seen["store_up"] == 1
    assert seen["store_memory_limit_bytes"] == 100 << 20
    assert 100_000 < seen["store_memory_used_bytes"] < 100 << 20
    assert seen["store_clients"] >= 2, "the supervisor's and the rpc process's"


def test_a_scrape_without_the_store_has_the_metrics_of_the_processes(
    service: ServiceProcess, store: StoreServer
) -> None:
    rpc = connect(service.address)
    with rpc.channel:
        run = rpc.create(batch_groups=1)
        run.push([make_group("a"), make_group("b")])
        run.pull(0)
        service.until_metric(2, "rollout_buffer_pushed_groups_total", outcome="queued")
        assert scraped(service)["ledger_groups"] > 0
        store.kill()
        assert failure(run.get).reason == "store_unavailable"
    seen = scraped(service)
    assert seen["store_up"] == 0
    assert seen["pushed_groups_total"] == 2
    assert seen["pull_wait_seconds_count"] == 1
    assert seen["store_errors_total"] >= 1
    assert not {"ledger_groups", "store_clients", "store_memory_used_bytes"} & seen.keys()


def test_a_scrape_does_not_wait_long_for_a_store_that_does_not_answer(
    service: ServiceProcess, store: StoreServer
) -> None:
    assert store.process is not None
    os.kill(store.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        seen = scraped(service)
        assert READ_S <= time.monotonic() - began < READ_S + SLACK_S
        assert seen["store_up"] == 0
    finally:
        os.kill(store.process.pid, signal.SIGCONT)
    service.until_metric(1, "rollout_buffer_store_up")


def test_a_run_of_another_layout_takes_no_other_one_out_of_metrics_and_lists(
    service: ServiceProcess, store: StoreServer
) -> None:
    rpc = connect(service.address)
    with rpc.channel:
        theirs, ours = rpc.create().run_id, rpc.create().run_id
    store.set_layout(theirs, SCHEMA_VERSION + 1)

    assert service.metric("rollout_buffer_store_up") == 1
    assert service.metric("rollout_buffer_runs_unread", reason="layout_changed") == 1
    assert service.metric("rollout_buffer_runs_unread") == 1
    assert service.metric("rollout_buffer_revision", run=ours) > 0
    assert service.metric("rollout_buffer_revision", run=theirs) == 0
    with urllib.request.urlopen(f"{service.admin}/api/runs", timeout=SLACK_S) as answer:
        assert [listed["run_id"] for listed in json.load(answer)] == [ours]
    (line,) = [line for line in service.log.read_text().splitlines() if "left out" in line]
    assert f"reason=layout_changed run={theirs} " in line, "once, not at every look"

    command = [sys.executable, "-m", "buffer_cli", "run", "list", "--address", service.address]
    around = {name: value for name, value in os.environ.items() if not name.startswith("RB_")} | {"COLUMNS": "200"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=around)
    assert ours in shown.stdout
    assert theirs not in shown.stdout
    assert f"run {theirs} is left out: " in shown.stderr

    store.set_layout(theirs, SCHEMA_VERSION)
    assert service.metric("rollout_buffer_runs_unread") == 0
    assert service.metric("rollout_buffer_revision", run=theirs) > 0
