"""Actions of the `rollout-buffer inspect` commands."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console

from buffer_cli.calls import calling, run_ref
from buffer_cli.exits import exit_code
from buffer_cli.inspect import tables
from buffer_cli.inspect.calls import InspectCalls, Listed
from buffer_cli.inspect.waits import print_waits
from buffer_service.observability.diagnosis import Standing, waits_on
from buffer_service.rpc.convert.runs import view_of
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import inspect_pb2 as pb

_SETS = words(pb.TaskSet)


def perform(address: str, timeout_s: float, given_run: str | None, command: Callable[[InspectCalls, str], int]) -> int:
    """Run a command on a run of the service at an address; returns the exit code."""

    def connected() -> int:
        with calling(InspectCalls, address, timeout_s) as calls:
            return command(calls, calls.run_id(given_run))

    return exit_code(connected)


def tasks(
    calls: InspectCalls,
    run_id: str,
    state: str,
    environment: str | None,
    worker_id: str,
    *,
    limit: int,
    token: str,
    as_json: bool,
) -> int:
    """Tasks of a set."""
    if state not in _SETS:
        raise InvalidField("--state", state, f"one of {', '.join(_SETS)}")
    request = pb.ListTasksRequest(
        run=run_ref(run_id), set=_SETS[state], environment=environment, worker_id=worker_id, page_token=token
    )
    listed = calls.tasks(request, _limit(limit))
    if as_json:
        return _print_list(run_id, "tasks", listed)
    return _print_table(tables.task_table(state, listed.items, listed.now_ms), listed, f"no task is {state}")


def task(calls: InspectCalls, run_id: str, task_id: str, *, as_json: bool) -> int:
    """One task."""
    reply = calls.call(calls.stub.GetTask, pb.GetTaskRequest(run=run_ref(run_id), task_id=task_id))
    if as_json:
        return _print_json(run_id, reply)
    tables.print_facts(f"task {task_id}", tables.task_facts(reply.task, reply.now_ms))
    return 0


def groups(
    calls: InspectCalls,
    run_id: str,
    step: int | None,
    environment: str | None,
    *,
    limit: int,
    token: str,
    as_json: bool,
) -> int:
    """Groups of the queue, or of a step."""
    request = pb.ListGroupsRequest(run=run_ref(run_id), step=step, environment=environment, page_token=token)
    listed = calls.groups(request, _limit(limit))
    if as_json:
        return _print_list(run_id, "groups", listed)
    nothing = "no group is queued" if step is None else f"no group of step {step} is left"
    return _print_table(tables.group_table(step, listed.items), listed, nothing)


def group(
    calls: InspectCalls,
    run_id: str,
    group_id: str,
    *,
    samples: bool,
    tokens_of: int | None,
    first: int,
    count: int,
    as_json: bool,
) -> int:
    """One group."""
    request = pb.GetGroupRequest(
        run=run_ref(run_id),
        group_id=group_id,
        include_samples=samples or not as_json,
        tokens_of_sample=tokens_of,
        first_token=first,
        max_tokens=count,
    )
    reply = calls.call(calls.stub.GetGroup, request)
    if as_json:
        return _print_json(run_id, reply)
    tables.print_facts(f"group {group_id}", tables.group_facts(reply))
    console = Console(highlight=False)
    if samples:
        console.print(tables.sample_table(reply.header.samples))
    if tokens_of is not None:
        tables.print_tokens(reply.token_ids, reply.header.samples[tokens_of], tokens_of, first)
    return 0


def batches(calls: InspectCalls, run_id: str, *, limit: int, token: str, as_json: bool) -> int:
    """Steps that are stored."""
    listed = calls.batches(pb.ListBatchesRequest(run=run_ref(run_id), page_token=token), _limit(limit))
    if as_json:
        return _print_list(run_id, "steps", listed)
    return _print_table(tables.step_table(listed.items), listed, "no step is stored")


def waits(calls: InspectCalls, run_id: str, *, limit: int, as_json: bool) -> int:
    """Print who waits on whom."""
    reply = calls.runs.get(run_id)
    view = view_of(reply.run, reply.revision)
    found = calls.call(calls.stub.GetWaits, pb.GetWaitsRequest(run=run_ref(run_id), limit=limit))
    if as_json:
        return _print_json(run_id, found, waits_on=waits_on(Standing.of(view)))
    print_waits(Console(highlight=False), view, found)
    return 0


def _limit(limit: int) -> int:
    if limit < 0:
        raise InvalidField("--limit", limit, "at least 0, which is all")
    return limit


def _values(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print_json(run_id: str, reply: Message, **more: object) -> int:
    print(json.dumps({"run": run_id, **_values(reply), **more}, indent=2))
    return 0


def _print_list(run_id: str, name: str, listed: Listed[Any]) -> int:
    items: Sequence[Message] = listed.items
    values = {
        "run": run_id,
        "revision": listed.revision,
        "now_ms": listed.now_ms,
        name: [_values(item) for item in items],
        "next_page_token": listed.next_page_token,
    }
    print(json.dumps(values, indent=2))
    return 0


def _print_table(table: object, listed: Listed[Any], nothing: str) -> int:
    if listed.items:
        Console(highlight=False).print(table)
    elif not listed.next_page_token:
        print(nothing)
    if listed.next_page_token:
        print(f"{len(listed.items):,} shown, there may be more: --limit N, or --limit 0 for all")
    return 0
