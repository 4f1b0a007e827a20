"""The page of metrics says what a loaded service answers, and what it answers follows Prometheus' conventions."""

import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rollout_buffer.v1 import runs_pb2, weights_pb2
from scripts import metrics_reference
from scripts.metrics_reference import OPEN, PREFIX, Family
from tests.support.rpc import TIMEOUT_S, VERSION_0, Rpc, failure, make_group, make_task
from tests.support.service import ServiceProcess

DOCUMENTED = {
    family.name: family for section in metrics_reference.sections() for family in metrics_reference.families(section)
}
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def scraped(service: ServiceProcess, rpc: Rpc) -> Iterator[str]:
    """A scrape of a service that has done a little of everything."""
    run = rpc.create(batch_groups=2, max_queued_groups=3, max_staleness=4, filter_equal_rewards=True, quota_groups=20)
    run.submit([make_task() for _ in range(3)])
    run.lease(max_tasks=2)
    groups = [make_group(f"g{i}", rewards=(0.0, 1.0), environment="math") for i in range(4)]
    run.push([*groups, groups[3], make_group("filtered", environment="code")])
    run.pull(0)
    assert failure(lambda: run.pull(1)).reason == "batch_not_ready"
    run.publish(1, commit_through_step=0)
    run.publish(2)
    report = weights_pb2.EngineReport(
        engine_id="e", worker_id="w", state=weights_pb2.ENGINE_STATE_READY, loaded=VERSION_0, reloads=3, errors=1
    )
    rpc.weights.ReportEngine(weights_pb2.ReportEngineRequest(run=run.ref, report=report), timeout=TIMEOUT_S)
    assert failure(type(run)(rpc, "missing").get).reason == "unknown_run"
    rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S)
    service.until_metric(2, "rollout_buffer_store_call_seconds_count", operation="pull")
    with urllib.request.urlopen(f"{service.admin}/metrics", timeout=10) as answer:
        yield answer.read().decode()


def metrics(text: str) -> Sequence[Metric]:
    return list(text_string_to_metric_families(text))


def test_the_page_is_up_to_date() -> None:
    assert metrics_reference.main(["--check"]) == 0, "run `python -m scripts.metrics_reference`"


@pytest.mark.parametrize("family", DOCUMENTED.values(), ids=lambda family: family.name)
def test_every_metric_has_a_text_and_known_values_of_its_labels(family: Family) -> None:
    assert family.text.endswith(".")
    assert family.kind in {"counter", "gauge", "histogram"}
    for label in family.labels:
        assert label in OPEN or family.values(label), label


def test_the_page_has_every_metric_of_a_scrape_and_no_other(scraped: str) -> None:
    found = {metric.name.removeprefix(PREFIX): metric for metric in metrics(scraped)}
    assert len(found) == len(metrics(scraped))
    assert found.keys() == {name for name in DOCUMENTED if not name.startswith("worker_")}
    for name, metric in found.items():
        assert (metric.type, metric.documentation) == (DOCUMENTED[name].kind, DOCUMENTED[name].text)


def test_labels_and_their_values_are_those_of_the_page(scraped: str) -> None:
    for metric in metrics(scraped):
        family = DOCUMENTED[metric.name.removeprefix(PREFIX)]
        for sample in metric.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert labels.keys() == set(family.labels), sample
            for name, value in labels.items():
                assert name in OPEN or value in family.values(name), sample


def test_methods_are_those_of_the_contract(scraped: str) -> None:
    seen = {
        sample.labels["method"] for metric in metrics(scraped) for sample in metric.samples if "method" in sample.labels
    }
    assert {"PushGroups", "PullBatch", "GetRun"} <= seen <= metrics_reference.METHODS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on PATH")
def test_promtool_finds_nothing_to_say_of_a_scrape(scraped: str) -> None:
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=scraped, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
