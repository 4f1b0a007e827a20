"""Control characters in whatever becomes a key, a label, a line of a log, a header or a file's name."""

import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from rollout_buffer.v1 import groups_pb2, inspect_pb2, runs_pb2, tasks_pb2
from tests.service.refusals import refused
from tests.support.rpc import Rpc, RunRpc, make_group, make_plan, make_task, manifest, mirrored
from tests.support.service import ServiceProcess

CALLS: dict[str, Callable[[RunRpc, str], object]] = {
    "tasks[0].environment": lambda run, name: run.submit([make_task(environment=name)]),
    "request_id": lambda run, name: run.rpc.tasks.SubmitTasks(run.submit_request([make_task()], request_id=name)),
    "instance_id": lambda run, name: run.lease(instance_id=name),
    "lease_ids[0]": lambda run, name: run.rpc.tasks.ExtendLeases(
        tasks_pb2.ExtendLeasesRequest(run=run.ref, worker_id="w", instance_id="i", lease_ids=[name])
    ),
    "returns[0].lease_id": lambda run, name: run.rpc.tasks.ReturnLeases(
        tasks_pb2.ReturnLeasesRequest(
            run=run.ref,
            worker_id="w",
            instance_id="i",
            returns=[tasks_pb2.LeaseReturn(lease_id=name, kind=tasks_pb2.RETURN_KIND_FAILED)],
        )
    ),
    "manifest.files.files[0].name": lambda run, name: run.publish(1, manifest=manifest(name=name)),
    "manifest.files.base_url": lambda run, name: run.publish(1, manifest=manifest(url=f"/{name}")),
    "manifest.files.mirrors[0]": lambda run, name: run.publish(1, manifest=mirrored(f"http://{name}")),
    "plan.master_address": lambda run, name: run.announce(make_plan(master_address=name)),
    "report.weights_url": lambda run, name: run.report("e", weights_url=f"http://{name}"),
    "policy.environments[0].environment": lambda run, name: run.update_policy(
        environments=[runs_pb2.EnvironmentRule(environment=name, share=1)]
    ),
    "environment": lambda run, name: run.rpc.inspect.ListTasks(
        inspect_pb2.ListTasksRequest(run=run.ref, set=inspect_pb2.TASK_SET_PENDING, environment=name)
    ),
}


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\x7fb", "a\u2028b"], ids=ascii)
@pytest.mark.parametrize("field", CALLS)
def test_a_control_character_is_refused_by_the_fields_name(rpc: Rpc, field: str, name: str) -> None:
    run = rpc.create()
    error = refused(run, lambda: CALLS[field](run, name), "invalid_field", field=field)
    assert name not in error.message, "it is shown escaped"


@pytest.mark.parametrize("field", ["environment", "lease_id", "worker_id"])
def test_one_in_a_group_refuses_the_group(rpc: Rpc, field: str) -> None:
    run = rpc.create()
    group = make_group("a")
    setattr(group.header, field, "a\0b")
    ack = run.push_one(group)
    assert ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID
    assert ack.error.attributes["field"] == field


def test_errors_of_engines_and_tasks_may_have_lines(rpc: Rpc) -> None:
    run = rpc.create()
    run.report("engine-0", last_error="line 1\nline 2")
    assert run.get().engines[0].last_error == "line 1\nline 2"


@pytest.mark.parametrize("name", ["a%00b", "a:record", "%7Bx%7D", "a" * 65])
def test_the_page_reads_no_run_of_a_name_that_none_can_have(service: ServiceProcess, name: str) -> None:
    for path in (f"/api/runs/{name}", f"/api/events?run={name}"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(service.admin + path, timeout=10)
        caught.value.close()
        assert caught.value.code == 404
