"""Checks of what has to work after the fuzz: on each run that was fuzzed, on a new one, and on the page."""

import json
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from buffer_wire.limits import MAX_VERSION
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2
from tests.fuzz.verdicts import Failure, Verdicts
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure_of, make_group, make_task

SIMPLE: dict[str, Any] = {"batch_groups": 1, "overflow_action": runs_pb2.OVERFLOW_ACTION_DROP_OLDEST}


def check_and_delete(rpc: Rpc, admin: str, run_ids: Iterable[str], verdicts: Verdicts) -> None:
    """Every run takes a group, gives a batch and commits it; then it is deleted."""
    new = RunRpc(rpc, "fuzz-after")
    rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=new.run_id, policy=runs_pb2.RunPolicy(**SIMPLE)))
    _said(verdicts, "a new run", lambda: _whole_life(new))
    _said(verdicts, "the metrics", lambda: _get(f"{admin}/metrics"))
    for run_id in {*run_ids, new.run_id}:
        run = RunRpc(rpc, run_id)
        try:
            run.get()
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                continue
            verdicts.fail(Failure(f"run {run_id} is not read: {failure_of(error).message}", "GetRun"))
        _said(verdicts, f"run {run_id}", lambda: _goes_on(run))  # noqa: B023 - called at once
        _said(verdicts, f"the page of {run_id}", lambda: json.loads(_get(f"{admin}/api/runs/{run_id}")))  # noqa: B023
        _said(verdicts, f"deletion of {run_id}", lambda: _delete(run))  # noqa: B023


def _said(verdicts: Verdicts, what: str, works: Callable[[], object]) -> None:
    try:
        works()
    except grpc.RpcError as error:
        failure = failure_of(error)
        verdicts.fail(Failure(f"{what} does not work: {failure.reason}: {failure.message}", f"works {failure.reason}"))
    except Exception as error:  # noqa: BLE001 - whatever it is, it does not work
        verdicts.fail(Failure(f"{what} does not work: {error!r}", f"works {type(error).__name__}"))


def _goes_on(run: RunRpc) -> None:
    """A trainer takes it over as it is, and trains one more step."""
    run.rpc.runs.ContinueRun(runs_pb2.ContinueRunRequest(run=run.ref), timeout=TIMEOUT_S)
    run.resume(mode=3)
    found = run.get()
    assert found.groups.balanced, "groups"
    assert found.tasks.balanced, "tasks"
    assert not found.paused, found.paused
    run.update_policy(**SIMPLE)
    _one_step(run, found.next_step, found.published.version)


def _whole_life(run: RunRpc) -> None:
    run.submit([make_task("task-1")])
    (lease,) = run.lease().leases
    group = make_group("task-1", lease_id=lease.lease_id)
    assert run.push_one(group).outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    batch, groups = run.pull(0)
    assert len(groups) == batch.total_groups == 1
    run.publish(1, commit_through_step=0)
    run.checkpoint(0)
    _one_step(run, 1, 1)


def _one_step(run: RunRpc, step: int, version: int) -> None:
    group = make_group(f"after-the-fuzz-{step}", version=common_pb2.WeightVersion(term=run.term, version=version))
    ack = run.push_one(group)
    assert ack.outcome == groups_pb2.PUSH_OUTCOME_QUEUED, ack
    batch, groups = run.pull(step)
    assert len(groups) == batch.total_groups == 1
    if version < MAX_VERSION:
        run.publish(version + 1, commit_through_step=step)
    else:
        run.commit(step)
    run.checkpoint(step)


def _delete(run: RunRpc) -> None:
    run.rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        content: bytes = answer.read()
    return content
