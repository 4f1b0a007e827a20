"""InspectService on a real service: what was put in comes out, and requests out of bounds are refused by name."""

import threading
import time
from typing import Any

import pytest

from buffer_wire.errors import InvalidField, ReplayGap, StepAhead, UnknownGroup, UnknownRun, UnknownTask
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2, tasks_pb2
from rollout_buffer.v1 import inspect_pb2 as pb
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure, make_group, make_task

DEADLINE_S = 60.0


def tasks(run: RunRpc, which: int, **fields: Any) -> pb.ListTasksResponse:
    values: dict[str, Any] = {"run": run.ref, "set": which, **fields}
    return run.rpc.inspect.ListTasks(pb.ListTasksRequest(**values), timeout=TIMEOUT_S)


def groups(run: RunRpc, **fields: Any) -> pb.ListGroupsResponse:
    values: dict[str, Any] = {"run": run.ref, **fields}
    return run.rpc.inspect.ListGroups(pb.ListGroupsRequest(**values), timeout=TIMEOUT_S)


def group(run: RunRpc, group_id: str, **fields: Any) -> pb.GetGroupResponse:
    values: dict[str, Any] = {"run": run.ref, "group_id": group_id, **fields}
    return run.rpc.inspect.GetGroup(pb.GetGroupRequest(**values), timeout=TIMEOUT_S)


def waits(run: RunRpc, **fields: Any) -> pb.GetWaitsResponse:
    values: dict[str, Any] = {"run": run.ref, **fields}
    return run.rpc.inspect.GetWaits(pb.GetWaitsRequest(**values), timeout=TIMEOUT_S)


def test_lists_hold_what_was_put_in_page_by_page(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10)
    run.submit([make_task(f"t{i}", environment="math") for i in range(5)])
    first = tasks(run, pb.TASK_SET_PENDING, page_size=3)
    second = tasks(run, pb.TASK_SET_PENDING, page_size=3, page_token=first.next_page_token)
    assert [task.task_id for task in [*first.tasks, *second.tasks]] == [f"t{i}" for i in range(5)]
    assert second.next_page_token == ""
    begin = first.tasks[0].sequence
    assert [task.sequence - begin for task in [*first.tasks, *second.tasks]] == list(range(5))
    assert first.tasks[0] == pb.TaskInfo(task_id="t0", sequence=begin, state=pb.TASK_STATE_PENDING, environment="math")
    pushed = run.fill(4)
    listed = groups(run, page_size=100)
    assert [one.group_id for one in listed.groups] == [f"x{i}/0" for i in range(4)]
    one = listed.groups[0]
    assert (one.place, one.samples, one.tokens, one.response_tokens, one.longest_tokens) == (
        pb.GROUP_PLACE_QUEUED, 2, 10, 8, 5,
    )  # fmt: skip
    assert (one.reward_milli, one.loss_tokens, one.bytes) == (1_000, 8, pushed[0].ByteSize())
    assert not one.HasField("micro_batch")
    run.pull(0)
    of_step = groups(run, step=0)
    assert [(one.group_id, one.place, one.micro_batch, one.rank) for one in of_step.groups] == [
        ("x0/0", pb.GROUP_PLACE_DELIVERED, 0, 0),
        ("x1/0", pb.GROUP_PLACE_DELIVERED, 0, 0),
    ]
    steps = rpc.inspect.ListBatches(pb.ListBatchesRequest(run=run.ref), timeout=TIMEOUT_S)
    (step,) = steps.steps
    assert (step.step, step.place, step.groups, step.target_groups, step.world_size, step.tokens) == (
        0, pb.GROUP_PLACE_DELIVERED, 2, 2, 1, 20,
    )  # fmt: skip
    assert steps.next_page_token == ""


def test_a_lease_is_listed_with_its_worker(rpc: Rpc) -> None:
    run = rpc.create(lease_ttl_ms=60_000)
    run.submit([make_task("t0"), make_task("t1")])
    (lease,) = run.lease(1).leases
    listed = tasks(run, pb.TASK_SET_LEASED, worker_id="worker")
    (task,) = listed.tasks
    assert (task.lease.lease_id, task.lease.worker_id, task.lease.instance_id) == (
        lease.lease_id, "worker", "instance-1",
    )  # fmt: skip
    assert task.lease.expires_ms - task.lease.heard_ms == 60_000
    assert task.leased_ms == task.lease.heard_ms <= listed.now_ms
    assert rpc.inspect.GetTask(pb.GetTaskRequest(run=run.ref, task_id="t0"), timeout=TIMEOUT_S).task == task
    assert not tasks(run, pb.TASK_SET_LEASED, worker_id="other").tasks


def test_a_group_is_shown_in_as_much_detail_as_is_asked_for(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    pushed = make_group("g", lengths=(4, 6, 9), rewards=(0.0, 0.5, 1.0))
    pushed.header.metadata_json = '{"secret": 1}'
    assert run.push_one(pushed).outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    short = group(run, "g/0")
    assert (short.samples, short.bytes, short.header.worker_id) == (3, pushed.ByteSize(), "w")
    assert not short.header.samples
    assert short.task.place == pb.GROUP_PLACE_QUEUED
    whole = group(run, "g/0", include_samples=True, tokens_of_sample=1)
    assert list(whole.header.samples) == list(pushed.header.samples)
    assert whole.header.metadata_json == ""
    ids = memoryview(pushed.payload)[: 4 * 19].cast("i").tolist()
    assert list(whole.token_ids) == ids[4:10]
    assert list(group(run, "g/0", tokens_of_sample=2, first_token=7, max_tokens=100).token_ids) == ids[17:19]
    assert list(group(run, "g/0", tokens_of_sample=2, first_token=2, max_tokens=3).token_ids) == ids[12:15]
    assert list(group(run, "g/0", tokens_of_sample=2, first_token=9).token_ids) == []
    out_of = failure(lambda: group(run, "g/0", tokens_of_sample=3))
    assert isinstance(out_of, InvalidField)
    assert "below 3" in out_of.message


def test_a_long_header_and_an_unusual_body_are_read_too(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4, max_queued_groups=4)
    long = make_group("long", lengths=[5] * 16)
    long.header.metadata_json = "x" * 200_000
    assert run.push_one(long).outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    ids = memoryview(long.payload)[: 4 * 80].cast("i").tolist()
    assert list(group(run, "long/0", tokens_of_sample=15).token_ids) == ids[75:]
    odd = make_group("odd")
    header, payload = odd.header.SerializeToString(), odd.payload
    assert len(header) < 128
    assert len(payload) < 128
    body = bytes([2 << 3 | 2, len(payload)]) + payload + bytes([1 << 3 | 2, len(header)]) + header
    ref = run.ref.SerializeToString()
    raw = bytes([1 << 3 | 2, len(ref)]) + ref + bytes([2 << 3 | 2, 0x80 | (len(body) & 0x7F), len(body) >> 7]) + body
    answer = rpc.channel.unary_unary("/rollout_buffer.v1.GroupService/PushGroup", None, None)(raw, timeout=TIMEOUT_S)
    assert groups_pb2.PushGroupResponse.FromString(answer).ack.outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    assert list(group(run, "odd/0", tokens_of_sample=1).token_ids) == memoryview(payload)[:40].cast("i").tolist()[4:]


def test_what_is_not_there_is_refused_by_name(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=4, retained_steps=1)
    run.submit([make_task("t0")])
    run.fill(3)
    for step in range(2):
        run.pull(step)
    run.commit(1)
    ref = common_pb2.RunRef(run_id="nowhere")
    no_task = failure(lambda: rpc.inspect.GetTask(pb.GetTaskRequest(run=run.ref, task_id="none"), timeout=TIMEOUT_S))
    assert isinstance(no_task, UnknownTask)
    assert no_task.attributes == {"run_id": run.run_id, "task_id": "none"}
    for group_id in ("none/0", "x2/1", "t0/0"):
        assert isinstance(failure(lambda name=group_id: group(run, name)), UnknownGroup)  # type: ignore[misc]
    assert isinstance(failure(lambda: groups(run, step=0)), ReplayGap)
    assert isinstance(failure(lambda: groups(run, step=2)), StepAhead)
    for call, request in (
        (rpc.inspect.GetWaits, pb.GetWaitsRequest(run=ref)),
        (rpc.inspect.ListGroups, pb.ListGroupsRequest(run=ref)),
        (rpc.inspect.ListBatches, pb.ListBatchesRequest(run=ref)),
        (rpc.inspect.ListTasks, pb.ListTasksRequest(run=ref, set=pb.TASK_SET_ENDED)),
    ):
        assert isinstance(failure(lambda c=call, r=request: c(r, timeout=TIMEOUT_S)), UnknownRun)  # type: ignore[misc]


def test_requests_out_of_bounds_are_refused_with_field_and_limit(rpc: Rpc) -> None:
    run = rpc.create(max_queued_groups=40)
    run.submit([make_task(f"t{i}") for i in range(3)])
    run.fill(3)
    token = tasks(run, pb.TASK_SET_PENDING, page_size=1).next_page_token
    of_groups = groups(run, page_size=1).next_page_token
    for field, call in {
        "set": lambda: tasks(run, 0),
        "page_size": lambda: tasks(run, pb.TASK_SET_PENDING, page_size=257),
        "worker_id": lambda: tasks(run, pb.TASK_SET_PENDING, worker_id="w"),
        "environment": lambda: groups(run, environment="e" * 65),
        "limit": lambda: waits(run, limit=101),
        "task_id": lambda: rpc.inspect.GetTask(pb.GetTaskRequest(run=run.ref, task_id="a b"), timeout=TIMEOUT_S),
        "group_id": lambda: group(run, "x0"),
        "max_tokens": lambda: group(run, "x0/0", max_tokens=65_537),
        "run.run_id": lambda: rpc.inspect.GetWaits(pb.GetWaitsRequest(), timeout=TIMEOUT_S),
    }.items():
        error = failure(call)
        assert isinstance(error, InvalidField), error
        assert error.attributes["field"] == field
    for call in (
        lambda: tasks(run, pb.TASK_SET_ENDED, page_token=token),
        lambda: tasks(run, pb.TASK_SET_PENDING, page_token=token, environment="sums"),
        lambda: tasks(run, pb.TASK_SET_PENDING, page_token=of_groups),
        lambda: tasks(run, pb.TASK_SET_PENDING, page_token="no token at all"),
        lambda: tasks(run, pb.TASK_SET_PENDING, page_token="A" * 2_000),
        lambda: groups(run, page_token=of_groups, step=0),
    ):
        error = failure(call)
        assert isinstance(error, InvalidField), error
        assert error.attributes["field"] == "page_token"


def test_waits_name_a_blocked_push_its_maker_and_what_binds(rpc: Rpc) -> None:
    run = rpc.create(
        batch_groups=2,
        max_queued_groups=2,
        overflow_action=runs_pb2.OVERFLOW_ACTION_BLOCK,
        max_inflight_groups=1,
        max_staleness=1,
    )
    run.submit([make_task(f"t{i}") for i in range(3)])
    (lease,) = run.lease(1).leases
    run.fill(2)
    before_ms = waits(run).now_ms
    blocked = make_group("t0", lease_id=lease.lease_id)
    pushing = threading.Thread(target=run.push, args=([blocked],))
    pushing.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := waits(run)).blocked_groups:
            assert time.monotonic() < deadline, "the push did not get into the line"
        (push,) = found.pushes
        assert (push.task_id, push.lease_id, push.worker_id, push.environment) == ("t0", lease.lease_id, "w", "sums")
        assert push.bytes == blocked.ByteSize()
        assert before_ms <= push.since_ms <= push.tried_ms <= found.now_ms
        assert [(room.rule, room.groups) for room in found.admission.rooms] == [("max_inflight_groups", 0)]
        assert (found.admission.due_tasks, found.admission.required_version) == (2, 0)
        assert [task.task_id for task in found.expiring] == ["t0"]
        assert [(one.worker_id, one.leases) for one in found.asked] == [("worker", 1)]
    finally:
        run.pull(0)
        pushing.join(DEADLINE_S)
    assert not pushing.is_alive()
    assert waits(run).blocked_groups == 0


@pytest.mark.parametrize(
    "waiting",
    [
        {"stale_action": runs_pb2.STALE_ACTION_WAIT, "max_staleness": 1, "max_lookahead": 1},
        {"order": runs_pb2.ORDER_SUBMISSION, "order_window_groups": 2, "max_lookahead": 1},
        {"order": runs_pb2.ORDER_SUBMISSION, "order_window_groups": 2, "reserve_queue_space": True},
    ],
)
def test_waits_of_a_run_whose_batches_wait_for_groups_in_flight(rpc: Rpc, waiting: dict[str, Any]) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=4, **waiting)
    (room,) = waits(run).admission.rooms
    assert room.groups == 4


def test_an_ended_task_says_why(rpc: Rpc) -> None:
    run = rpc.create(max_attempts=1)
    run.submit([make_task("t0")])
    (lease,) = run.lease(1).leases
    returned = tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_FAILED, error="no engine")
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref, worker_id="worker", instance_id="instance-1", returns=[returned]
    )
    rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
    (task,) = tasks(run, pb.TASK_SET_ENDED).tasks
    assert (task.task_id, task.state, task.error, task.failures) == ("t0", pb.TASK_STATE_FAILED, "no engine", 1)
