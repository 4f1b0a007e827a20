"""Bad requests: each is refused with a reason and the facts behind it, and nothing is written."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import (
    batches_pb2,
    common_pb2,
    groups_pb2,
    runs_pb2,
    tasks_pb2,
    weights_pb2,
)
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect, failure, make_group, make_task, manifest, streamed
from tests.support.service import ServiceProcess

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def refused(run: RunRpc, call: Callable[[], object], reason: str, **attributes: str) -> RolloutBufferError:
    """`call` fails with `reason` and these attributes, and the run stays as it is."""
    before = run.get()
    error = failure(call)
    assert error.reason == reason, error
    for name, value in attributes.items():
        assert error.attributes[name] == value
    assert run.get() == before
    return error


# ── runs and policies ────────────────────────────────────────────────────────


def test_an_unknown_run_is_named_by_every_method(rpc: Rpc) -> None:
    run = RunRpc(rpc, "nobody")
    group = make_group("x")
    calls: list[Callable[[], object]] = [
        run.get,
        lambda: rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref), timeout=TIMEOUT_S),
        lambda: run.submit([make_task()]),
        run.lease,
        lambda: rpc.tasks.ExtendLeases(
            tasks_pb2.ExtendLeasesRequest(run=run.ref, worker_id="w", instance_id="i", lease_ids=["a/0/1"]),
            timeout=TIMEOUT_S,
        ),
        lambda: rpc.tasks.ReturnLeases(
            tasks_pb2.ReturnLeasesRequest(
                run=run.ref,
                worker_id="w",
                instance_id="i",
                returns=[tasks_pb2.LeaseReturn(lease_id="a/0/1", kind=tasks_pb2.RETURN_KIND_INTERRUPTED)],
            ),
            timeout=TIMEOUT_S,
        ),
        lambda: run.push([group]),
        lambda: run.push_one(group),
        lambda: run.pull(0),
        lambda: run.commit(0),
        lambda: run.checkpoint(0),
        run.resume,
        lambda: run.publish(1),
        lambda: list(rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S)),
        lambda: rpc.weights.ReportEngine(
            weights_pb2.ReportEngineRequest(run=run.ref, report=_report()), timeout=TIMEOUT_S
        ),
    ]
    for call in calls:
        error = failure(call)
        assert error.reason == "unknown_run"
        assert error.attributes["run_id"] == "nobody"
    assert "nobody" not in rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids


@pytest.mark.parametrize("run_id", ["", "-run", "a b", "x" * 65, "{a}"])
def test_a_malformed_run_id_is_refused(rpc: Rpc, run_id: str) -> None:
    error = failure(lambda: rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run_id), timeout=TIMEOUT_S))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "run_id")


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"batch_groups": 0}, "policy.batch_groups"),
        ({"batch_groups": 65_537}, "policy.batch_groups"),
        ({"max_queued_groups": 0}, "policy.max_queued_groups"),
        ({"max_queued_bytes": 1}, "policy.max_queued_bytes"),
        ({"lease_ttl_ms": 10}, "policy.lease_ttl_ms"),
        ({"max_attempts": 0}, "policy.max_attempts"),
        ({"prefetch_batches": 65}, "policy.prefetch_batches"),
        ({"overflow_action": 9}, "policy.overflow_action"),
        ({"stale_action": 9}, "policy.stale_action"),
    ],
)
def test_a_policy_out_of_bounds_names_its_field(rpc: Rpc, policy: dict[str, Any], field: str) -> None:
    run = rpc.create()
    message = runs_pb2.RunPolicy(**policy)
    refused(
        run,
        lambda: rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref, policy=message), timeout=TIMEOUT_S),
        "invalid_field",
        field=field,
    )
    error = failure(
        lambda: rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id="refused", policy=message), timeout=TIMEOUT_S)
    )
    assert error.attributes["field"] == field
    assert "refused" not in rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"batch_groups": 8, "max_queued_groups": 4}, "max_queued_groups"),
        ({"batch_groups": 8, "max_queued_tokens": 4}, "max_queued_tokens"),
        ({"max_staleness": 0, "prefetch_batches": 1}, "max_staleness"),
        ({"max_lookahead": 0, "batches_per_publish": 1, "prefetch_batches": 2}, "max_lookahead"),
    ],
)
def test_a_policy_that_could_not_progress_is_refused(rpc: Rpc, policy: dict[str, Any], field: str) -> None:
    run = rpc.create()
    request = runs_pb2.UpdatePolicyRequest(run=run.ref, policy=runs_pb2.RunPolicy(**policy))
    refused(run, lambda: rpc.runs.UpdatePolicy(request, timeout=TIMEOUT_S), "invalid_policy", field=field)


def test_a_run_of_another_policy_is_not_taken_for_the_same(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4)
    request = runs_pb2.CreateRunRequest(run_id=run.run_id, policy=runs_pb2.RunPolicy(batch_groups=8))
    error = refused(run, lambda: rpc.runs.CreateRun(request, timeout=TIMEOUT_S), "run_exists", run_id=run.run_id)
    assert "batch_groups" in error.attributes["differs"]


# ── tasks and leases ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (make_task("a b"), "tasks[0].task_id"),
        (make_task(group_size=0), "tasks[0].group_size"),
        (make_task(group_size=1_025), "tasks[0].group_size"),
        (make_task(prompt_token_ids=[]), "tasks[0].prompt_token_ids"),
        (make_task(prompt_token_ids=[1, -1]), "tasks[0].prompt_token_ids"),
        (make_task(messages=[tasks_pb2.ChatMessage(role="user")]), "tasks[0].prompt_token_ids"),
        (
            make_task(prompt_token_ids=[], messages=[tasks_pb2.ChatMessage(role="robot")]),
            "tasks[0].messages[0].role",
        ),
        (make_task(environment="e" * 65), "tasks[0].environment"),
        (make_task(priority=256), "tasks[0].priority"),
        (make_task(metadata_json="x" * (256 * 1024 + 1)), "tasks[0].metadata_json"),
        (make_task(sampling=None), "tasks[0].sampling.max_new_tokens"),
        (
            make_task(sampling=tasks_pb2.SamplingParams(max_new_tokens=1, temperature=0.0)),
            "tasks[0].sampling.temperature",
        ),
        (make_task(sampling=tasks_pb2.SamplingParams(max_new_tokens=1, top_p=1.5)), "tasks[0].sampling.top_p"),
        (make_task(sampling=tasks_pb2.SamplingParams(max_new_tokens=1, top_k=0)), "tasks[0].sampling.top_k"),
        (make_task(sampling=tasks_pb2.SamplingParams(max_new_tokens=1, stop=["a"] * 17)), "tasks[0].sampling.stop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_task_names_its_field(rpc: Rpc, task: tasks_pb2.Task, field: str) -> None:
    run = rpc.create()
    refused(run, lambda: run.submit([task]), "invalid_field", field=field)


def test_a_submit_is_checked_before_anything_is_written(rpc: Rpc) -> None:
    run = rpc.create(max_pending_tasks=3)
    run.submit([make_task("a")])
    send = rpc.tasks.SubmitTasks
    cases: list[tuple[dict[str, Any], str, dict[str, str]]] = [
        ({"epoch": 0}, "invalid_field", {"field": "epoch"}),
        ({"epoch": 2}, "stale_epoch", {"epoch": "2", "current": "1"}),
        ({"expected_cursor": 7, "cursor": 8}, "cursor_conflict", {"cursor": "1"}),
        ({"cursor": 0}, "invalid_field", {"field": "cursor"}),
        ({"request_id": ""}, "invalid_field", {"field": "request_id"}),
        ({"feeder_state": bytes(65_537)}, "invalid_field", {"field": "feeder_state"}),
        ({"tasks": []}, "invalid_field", {"field": "tasks"}),
        ({"tasks": [make_task("a")]}, "invalid_field", {"field": "tasks[0].task_id"}),
        ({"tasks": [make_task("b"), make_task("b")]}, "invalid_field", {"field": "tasks[1].task_id"}),
        ({"tasks": [make_task()] * 3}, "pending_full", {"pending": "1", "limit": "3"}),
    ]
    for fields, reason, attributes in cases:
        request = run.submit_request(**{"tasks": [make_task()], **fields})
        refused(run, lambda request=request: send(request, timeout=TIMEOUT_S), reason, **attributes)  # type: ignore[misc]


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": ""},
        {"worker_id": "a b"},
        {"instance_id": ""},
        {"request_id": "r" * 65},
        {"engine_id": ""},
        {"max_tasks": 0},
        {"max_tasks": 257},
        {"wait_ms": 60_001},
    ],
    ids=str,
)
def test_a_bad_lease_request_names_its_field(rpc: Rpc, fields: dict[str, Any]) -> None:
    run = rpc.create()
    run.submit([make_task()])
    refused(
        run,
        lambda: rpc.tasks.LeaseTasks(run.lease_request(**fields), timeout=TIMEOUT_S),
        "invalid_field",
        field=next(iter(fields)),
    )


def test_an_engine_without_weights_is_refused(rpc: Rpc) -> None:
    run = rpc.create()
    refused(run, lambda: run.lease(loaded=None), "invalid_field", field="loaded.epoch")
    request = weights_pb2.ReportEngineRequest(run=run.ref, report=_report(loaded=None))
    refused(
        run, lambda: rpc.weights.ReportEngine(request, timeout=TIMEOUT_S), "invalid_field", field="report.loaded.epoch"
    )


def test_a_bad_return_is_refused_as_a_whole(rpc: Rpc) -> None:
    run = rpc.create()
    run.submit([make_task("a")])
    lease_id = run.lease().leases[0].lease_id
    foreign, broken = make_group("b"), make_group("a")
    broken.payload = b""
    good = tasks_pb2.LeaseReturn(lease_id=lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED)
    interrupted, failed = tasks_pb2.RETURN_KIND_INTERRUPTED, tasks_pb2.RETURN_KIND_FAILED
    for bad, field in (
        (tasks_pb2.LeaseReturn(lease_id="x/0/1"), "returns[1].kind"),
        (
            tasks_pb2.LeaseReturn(lease_id="x/0/1", kind=failed, error="e" * 2_049),
            "returns[1].error",
        ),
        (
            tasks_pb2.LeaseReturn(lease_id="a/0/9", kind=interrupted, continuation=foreign),
            "returns[1].continuation.task_id",
        ),
        (
            tasks_pb2.LeaseReturn(lease_id="a/0/9", kind=interrupted, continuation=broken),
            "returns[1].continuation.payload",
        ),
        (good, "returns[1]"),
    ):
        request = tasks_pb2.ReturnLeasesRequest(
            run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, returns=[good, bad]
        )
        refused(
            run,
            lambda request=request: rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S),  # type: ignore[misc]
            "invalid_field",
            field=field,
        )


# ── groups ───────────────────────────────────────────────────────────────────


def _broken(change: Callable[[groups_pb2.Group], None]) -> groups_pb2.Group:
    group = make_group("x")
    change(group)
    return group


def _wrong_dtype(group: groups_pb2.Group) -> None:
    group.header.columns[1].dtype = groups_pb2.D_TYPE_FLOAT64


def _too_short(group: groups_pb2.Group) -> None:
    group.payload = group.payload[:-1]


def _empty(group: groups_pb2.Group) -> None:
    del group.header.samples[:]


def _unfinished(group: groups_pb2.Group) -> None:
    group.header.samples[1].finish_reason = groups_pb2.FINISH_REASON_ABORTED


def _endless_reward(group: groups_pb2.Group) -> None:
    group.header.samples[0].reward = float("inf")


def _gap_in_spans(group: groups_pb2.Group) -> None:
    group.header.samples[0].spans[0].start = 2


def _huge_header(group: groups_pb2.Group) -> None:
    group.header.samples[0].turns.extend([groups_pb2.Turn(role="r" * 4_000, start=0, end=1)] * 300)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_wrong_dtype, "columns[1].dtype"),
        (_too_short, "payload"),
        (_empty, "samples"),
        (_unfinished, "samples[1].finish_reason"),
        (_endless_reward, "samples[0].reward"),
        (_gap_in_spans, "samples[0].spans[0]"),
        (_huge_header, "header"),
    ],
)
def test_a_bad_group_names_its_field(rpc: Rpc, change: Callable[[groups_pb2.Group], None], field: str) -> None:
    run = rpc.create(batch_groups=1)
    group = _broken(change)
    before = run.get()
    for ack in (*run.push([group]), run.push_one(group)):
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID
        assert ack.error.reason == "invalid_field"
        assert ack.error.attributes["field"] == field
        assert ack.error.attributes["limit"]
    assert run.get() == before


def test_an_unknown_lease_is_named_and_nothing_is_queued(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.submit([make_task("a")])
    before = run.get()
    for task_id, lease_id in (("a", "a/0/1"), ("zz", "zz/0/1")):
        ack = run.push_one(make_group(task_id, lease_id=lease_id))
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID
        assert ack.error.reason == "unknown_lease"
        assert ack.error.attributes["lease_id"] == lease_id
    ack = run.push_one(make_group("a", lease_id="not a lease"))
    assert (ack.error.reason, ack.error.attributes["field"]) == ("invalid_field", "lease_id")
    assert run.get() == before


def test_a_group_above_the_queues_byte_cap_is_refused_at_once(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_bytes=1 << 20)
    before = run.get()
    ack = run.push_one(make_group("x", lengths=(150_000,)))
    assert (ack.error.reason, ack.error.attributes["field"]) == ("invalid_field", "payload")
    assert run.get() == before


def test_a_bundle_that_is_malformed_ends_the_stream_after_what_was_good(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    good = groups_pb2.PushGroupsRequest(run=run.ref, sequence=1, groups=[make_group("x0")])
    late = groups_pb2.PushGroupsRequest(run=run.ref, sequence=3, groups=[make_group("x1")])
    replies = streamed(rpc.groups.PushGroups(iter([good, late]), timeout=TIMEOUT_S))
    assert next(replies).acks[0].outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    error = failure(lambda: next(replies))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "sequence")
    assert run.get().groups.accepted.groups == 1


@pytest.mark.parametrize("method", ["GroupService/PushGroup", "BatchService/PullBatch"])
def test_bytes_that_are_no_message_are_refused(rpc: Rpc, method: str) -> None:
    if method.endswith("PullBatch"):
        error = failure(lambda: list(rpc.channel.unary_stream(f"/rollout_buffer.v1.{method}")(b"\xff\xff", timeout=9)))
    else:
        error = failure(lambda: rpc.channel.unary_unary(f"/rollout_buffer.v1.{method}")(b"\xff\xff", timeout=9))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "message")


def test_a_push_bundle_of_bytes_that_are_no_message_is_refused(rpc: Rpc) -> None:
    push = rpc.channel.stream_stream("/rollout_buffer.v1.GroupService/PushGroups")
    error = failure(lambda: list(push(iter([b"\xff\xff"]), timeout=9)))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "message")


# ── batches and weights ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": 0}, "epoch"),
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
        error = refused(run, call, "stale_epoch", epoch="1", current="2")
        assert not error.retryable


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (weights_pb2.WeightManifest(), "manifest.kind"),
        (manifest(url="weights/1"), "manifest.files.base_url"),
        (manifest(name="../secrets"), "manifest.files.files[0].name"),
        (manifest(name="/etc/passwd"), "manifest.files.files[0].name"),
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
    request = weights_pb2.ReportEngineRequest(run=run.ref, report=_report(**fields))
    refused(run, lambda: rpc.weights.ReportEngine(request, timeout=TIMEOUT_S), "invalid_field", field=field)


def _report(**fields: Any) -> weights_pb2.EngineReport:
    values: dict[str, Any] = {
        "engine_id": "engine-0",
        "worker_id": "worker",
        "state": weights_pb2.ENGINE_STATE_READY,
        "loaded": common_pb2.WeightVersion(epoch=1),
        **fields,
    }
    return weights_pb2.EngineReport(**values)


# ── runs that are stopped ────────────────────────────────────────────────────


def test_a_store_behind_what_was_acknowledged_pauses_the_run_until_it_is_resumed(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    acknowledged = run.submit([make_task()]).revision + 1_000
    ahead = common_pb2.RunRef(run_id=run.run_id, seen_revision=acknowledged)
    request = batches_pb2.CommitRequest(run=ahead, epoch=1, through_step=0)
    error = failure(lambda: rpc.batches.Commit(request, timeout=TIMEOUT_S))
    assert (error.reason, error.attributes["seen_revision"]) == ("store_rolled_back", str(acknowledged))
    assert run.get().paused == "store_rolled_back"
    for call in (lambda: run.submit([make_task()]), lambda: run.push([make_group("x")]), lambda: run.pull(0)):
        paused = refused(run, call, "run_paused")
        assert "store_rolled_back" in paused.attributes["why"]
    assert run.lease().wait == tasks_pb2.LEASE_WAIT_PAUSED
    assert run.resume().epoch == 2
    assert run.submit([make_task()]).revision > acknowledged


def test_too_many_failed_tasks_stop_the_trainer_with_the_last_error(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_attempts=1, failure_budget=0)
    run.submit([make_task("a"), make_task("b")])
    lease_id = run.lease().leases[0].lease_id
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref,
        worker_id=run.worker_id,
        instance_id=run.instance_id,
        returns=[tasks_pb2.LeaseReturn(lease_id=lease_id, kind=tasks_pb2.RETURN_KIND_FAILED, error="no reward")],
    )
    rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
    refused(run, lambda: run.pull(0), "failure_budget_exceeded", failed="1", budget="0", last_error="no reward")
    assert run.lease().wait == tasks_pb2.LEASE_WAIT_PAUSED
    policy = runs_pb2.RunPolicy(batch_groups=1, max_attempts=1, failure_budget=5)
    rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref, policy=policy), timeout=TIMEOUT_S)
    assert [lease.task.task_id for lease in run.lease().leases] == ["b"]


def test_a_payload_above_the_services_limit_is_refused(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    before = run.get()
    limit = 64 << 20
    group = make_group("x")
    group.payload = bytes(limit + 1)
    generous = connect(service.address)
    try:
        ack = RunRpc(generous, run.run_id).push_one(group)
        assert (ack.error.reason, ack.error.attributes["field"]) == ("invalid_field", "payload")
        assert str(limit) in ack.error.attributes["limit"]
    finally:
        generous.channel.close()
    assert run.get() == before
