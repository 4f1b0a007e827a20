"""Bad pulls, manifests and engine reports, and trainers out of step: each is refused with a reason and the facts behind
it, and nothing is written."""

from typing import TYPE_CHECKING, Any

import pytest

from rollout_buffer.v1 import weights_pb2
from tests.service.refusals import engine_report, refused
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, make_task, manifest, mirrored

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"term": 0}, "term"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 4_097}, "world_size"),
        ({"rank": 1}, "rank"),
        ({"wait_ms": 3_600_001}, "wait_ms"),
    ],
)
def test_a_bad_pull_names_its_field(rpc: Rpc, fields: dict[str, Any], field: str) -> None:
    run = rpc.create(batch_groups=1)
    run.fill(1)
    refused(run, lambda: run.pull(0, **fields), "invalid_field", field=field)


def test_the_trainers_clock_cannot_be_skipped(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=2)
    run.fill(2)
    run.publish(3)
    refused(run, lambda: run.pull(1), "step_ahead", step="1", next_step="0")
    refused(run, lambda: run.pull(0, train_version=2), "invalid_field", field="train_version")
    run.pull(0)
    refused(run, lambda: run.pull(0, world_size=2), "world_size_mismatch", world_size="2", expected="1")
    refused(run, lambda: run.commit(1), "step_ahead", step="1", next_step="1")
    refused(run, lambda: run.checkpoint(0), "not_committed", step="0", committed_steps="0")
    refused(run, lambda: run.publish(3, manifest=manifest()), "version_conflict", version="3", published="3")
    refused(run, lambda: run.publish(2), "version_conflict", version="2")
    refused(run, lambda: run.publish(4, commit_through_step=5), "step_ahead", step="5")
    run.commit(0)
    run.checkpoint(0)
    refused(run, lambda: run.pull(0), "replay_gap", step="0", first_retained="1")
    refused(run, lambda: run.resume(next_step=0), "replay_gap")


def test_a_trainer_that_was_taken_over_is_fenced_off(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.fill(1)
    run.pull(0)
    zombie = RunRpc(rpc, run.run_id)
    run.resume(next_step=0)
    calls: list[Callable[[], object]] = [
        lambda: zombie.submit([make_task()]),
        lambda: zombie.pull(0),
        lambda: zombie.commit(0),
        lambda: zombie.checkpoint(0),
        lambda: zombie.publish(1),
    ]
    for call in calls:
        error = refused(run, call, "stale_term", term="1", current="2")
        assert not error.retryable


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (weights_pb2.WeightManifest(), "manifest.kind"),
        (manifest(url="weights/1"), "manifest.files.base_url"),
        (manifest(name="../secrets"), "manifest.files.files[0].name"),
        (manifest(name="/etc/passwd"), "manifest.files.files[0].name"),
        (mirrored("relay:8090"), "manifest.files.mirrors[0]"),
        (mirrored("http://a", "https://" + "b" * 250), "manifest.files.mirrors[1]"),
        (mirrored(*["http://relay"] * 17), "manifest.files.mirrors"),
        (
            weights_pb2.WeightManifest(files=weights_pb2.FilesManifest(base_url="/w")),
            "manifest.files.files",
        ),
        (
            weights_pb2.WeightManifest(
                files=weights_pb2.FilesManifest(base_url="/w", files=[weights_pb2.WeightFile(name="a", sha256=b"x")])
            ),
            "manifest.files.files[0].sha256",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_manifest_names_its_field(rpc: Rpc, bad: weights_pb2.WeightManifest, field: str) -> None:
    run = rpc.create()
    refused(run, lambda: run.publish(1, manifest=bad), "invalid_field", field=field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"engine_id": "a b"}, "report.engine_id"),
        ({"worker_id": ""}, "report.worker_id"),
        ({"state": 0}, "report.state"),
        ({"last_error": "e" * 2_049}, "report.last_error"),
    ],
)
def test_a_bad_engine_report_names_its_field(rpc: Rpc, fields: dict[str, Any], field: str) -> None:
    run = rpc.create()
    request = weights_pb2.ReportEngineRequest(run=run.ref, report=engine_report(**fields))
    refused(run, lambda: rpc.weights.ReportEngine(request, timeout=TIMEOUT_S), "invalid_field", field=field)
