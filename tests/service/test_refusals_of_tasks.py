"""Bad tasks, lease requests and returns: each is refused with a reason and the facts behind it, and nothing is
written."""

from math import nan
from typing import Any

import pytest

from rollout_buffer.v1 import tasks_pb2, weights_pb2
from tests.service.refusals import engine_report, refused
from tests.support.rpc import TIMEOUT_S, Rpc, make_group, make_task


def sampled(**fields: Any) -> tasks_pb2.Task:
    return make_task(sampling=tasks_pb2.SamplingParams(max_new_tokens=9, **fields))


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
        (sampled(seed=1 << 53), "tasks[0].sampling.seed"),
        (sampled(min_p=-0.5), "tasks[0].sampling.min_p"),
        (sampled(min_p=1.5), "tasks[0].sampling.min_p"),
        (sampled(min_p=nan), "tasks[0].sampling.min_p"),
        (sampled(repetition_penalty=0.0), "tasks[0].sampling.repetition_penalty"),
        (sampled(repetition_penalty=2.5), "tasks[0].sampling.repetition_penalty"),
        (sampled(min_new_tokens=10), "tasks[0].sampling.min_new_tokens"),
        (make_task(columns=["hidden_states"]), "tasks[0].columns"),
        (make_task(columns=["top_logprobs"]), "tasks[0].columns"),
        (make_task(columns=["top_logprobs_0"]), "tasks[0].columns"),
        (make_task(columns=["top_logprobs_1025"]), "tasks[0].columns"),
        (make_task(columns=["top_logprobs_5", "top_logprobs_6"]), "tasks[0].columns"),
        (make_task(columns=["sampling_mask", "sampling_mask"]), "tasks[0].columns[1]"),
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
        ({"term": 0}, "invalid_field", {"field": "term"}),
        ({"term": 2}, "stale_term", {"term": "2", "current": "1"}),
        ({"expected_cursor": 7, "cursor": 8}, "cursor_conflict", {"cursor": "1"}),
        ({"cursor": 0}, "invalid_field", {"field": "cursor"}),
        ({"request_id": ""}, "invalid_field", {"field": "request_id"}),
        ({"feeder_state": bytes(65_537)}, "invalid_field", {"field": "feeder_state"}),
        ({"tasks": [make_task()] * 4_097}, "invalid_field", {"field": "tasks"}),
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
    refused(run, lambda: run.lease(loaded=None), "invalid_field", field="loaded.term")
    request = weights_pb2.ReportEngineRequest(run=run.ref, report=engine_report(loaded=None))
    refused(
        run, lambda: rpc.weights.ReportEngine(request, timeout=TIMEOUT_S), "invalid_field", field="report.loaded.term"
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
            tasks_pb2.LeaseReturn(lease_id="a/0/9", kind=interrupted, partial_rollout=foreign),
            "returns[1].partial_rollout.task_id",
        ),
        (
            tasks_pb2.LeaseReturn(lease_id="a/0/9", kind=interrupted, partial_rollout=broken),
            "returns[1].partial_rollout.payload",
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
