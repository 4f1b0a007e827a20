"""Actions of the `rollout-buffer inspect` commands."""

from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buffer_cli.calls import run_ref
from buffer_cli.inspect import tables, text
from buffer_cli.inspect.calls import on_run
from buffer_cli.inspect.commands import PageOptions
from buffer_cli.inspect.waits import print_waits
from buffer_cli.options import CallOptions
from buffer_cli.output import print_facts, print_json, show, values_of
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_service.rpc.convert.runs import view_of
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import inspect_pb2 as pb

_SETS = words(pb.TaskSet)


def tasks(
    service: CallOptions,
    run_id: str | None,
    state: str,
    environment: str | None,
    page: PageOptions,
    worker_id: str = "",
) -> None:
    """Tasks of a set."""
    with on_run(service, run_id) as (calls, run):
        if state not in _SETS:
            raise InvalidField("--state", state, f"one of {', '.join(_SETS)}")
        request = pb.ListTasksRequest(run=run_ref(run), set=_SETS[state], environment=environment, worker_id=worker_id)
        reply = calls.listed(calls.stub.ListTasks, request, "tasks", page)
    _print(run, reply, page, tables.task_table(state, reply.tasks, reply.now_ms), nothing=f"no task is {state}")


def leases(
    service: CallOptions, run_id: str | None, worker_id: str, environment: str | None, page: PageOptions
) -> None:
    """Leased tasks."""
    tasks(service, run_id, "leased", environment, page, worker_id)


def task(service: CallOptions, run_id: str | None, task_id: str, *, as_json: bool) -> None:
    """One task."""
    with on_run(service, run_id) as (calls, run):
        reply = calls.call(calls.stub.GetTask, pb.GetTaskRequest(run=run_ref(run), task_id=task_id))
    if as_json:
        _print_json(run, reply)
    else:
        print_facts(
            Console(highlight=False),
            f"[bold]task {escape(task_id)}[/bold]",
            tables.task_facts(reply.task, reply.now_ms),
        )


def groups(
    service: CallOptions, run_id: str | None, step: int | None, environment: str | None, page: PageOptions
) -> None:
    """Groups of the queue, or of a step."""
    with on_run(service, run_id) as (calls, run):
        request = pb.ListGroupsRequest(run=run_ref(run), step=step, environment=environment)
        reply = calls.listed(calls.stub.ListGroups, request, "groups", page)
    nothing = "no group is queued" if step is None else f"no group of step {step} is left"
    _print(run, reply, page, tables.group_table(step, reply.groups), nothing=nothing)


def group(
    service: CallOptions,
    run_id: str | None,
    group_id: str,
    *,
    samples: bool,
    tokens_of: int | None,
    first: int,
    count: int,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """One group."""
    decode = text.tokenizer(tokenizer) if tokenizer and not as_json else None
    with on_run(service, run_id) as (calls, run):
        request = pb.GetGroupRequest(
            run=run_ref(run),
            group_id=group_id,
            include_samples=samples or not as_json,
            tokens_of_sample=tokens_of,
            first_token=first,
            max_tokens=count,
        )
        reply = calls.call(calls.stub.GetGroup, request)
    if as_json:
        _print_json(run, reply)
        return
    print_facts(Console(highlight=False), f"[bold]group {escape(group_id)}[/bold]", tables.group_facts(reply))
    if samples:
        show(tables.sample_table(reply.header.samples))
    if tokens_of is not None:
        sample = reply.header.samples[tokens_of]
        tables.print_tokens(reply.token_ids, sample, tokens_of, first, ids=decode is None)
        if decode is not None:
            parts = list(text.segments(sample, reply.token_ids, reply.loss_mask, first))
            show(text.legend(parts))
            show(text.as_text(parts, decode))


def batches(service: CallOptions, run_id: str | None, page: PageOptions) -> None:
    """Steps that are stored."""
    with on_run(service, run_id) as (calls, run):
        reply = calls.listed(calls.stub.ListBatches, pb.ListBatchesRequest(run=run_ref(run)), "steps", page)
    _print(run, reply, page, tables.step_table(reply.steps), nothing="no step is stored")


def waits(service: CallOptions, run_id: str | None, limit: int, *, as_json: bool) -> None:
    """Print who waits on whom."""
    with on_run(service, run_id) as (calls, run):
        reply = calls.get(run)
        found = calls.call(calls.stub.GetWaits, pb.GetWaitsRequest(run=run_ref(run), limit=limit))
    view = view_of(reply.run, reply.revision)
    if as_json:
        _print_json(run, found, waits_on=waits_on(Situation.of(view)))
    else:
        print_waits(view, found)


def _print_json(run_id: str, reply: Message, **more: object) -> None:
    print_json({"run": run_id, **values_of(reply), **more})


def _print(run_id: str, reply: Any, page: PageOptions, table: Table, nothing: str) -> None:  # noqa: ANN401 - of any list
    """Print a list; `nothing` where it is empty."""
    if page.as_json:
        _print_json(run_id, reply, revision=reply.revision, now_ms=reply.now_ms)
        return
    if table.row_count:
        show(table)
    elif not reply.next_page_token:
        print(nothing)
    if reply.next_page_token:
        print(f"{table.row_count:,} shown, there may be more: --limit N, or --limit 0 for all")
