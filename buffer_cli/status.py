"""`rollout-buffer status`: one look at a run, for people or as JSON."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from buffer_service.domain.policy import UNSET
from buffer_service.observability.diagnosis import Standing, waits_on
from buffer_wire.channel import client_options
from buffer_wire.errors import RolloutBufferError
from buffer_wire.status import error_of
from rollout_buffer.v1 import common_pb2, runs_pb2, runs_pb2_grpc, weights_pb2

_DISPOSITIONS = tuple(field.name for field in runs_pb2.GroupLedger.DESCRIPTOR.fields if field.message_type is not None)
_TASK_STATES = ("submitted", "pending", "leased", "completed", "failed", "cancelled")


def show(address: str, run_id: str | None, *, as_json: bool, timeout_s: float) -> int:
    """Print where a run stands; returns the exit code."""
    with grpc.insecure_channel(address, client_options()) as channel:
        stub = runs_pb2_grpc.RunServiceStub(channel)
        try:
            run_ids = [run_id] if run_id else list(stub.ListRuns(runs_pb2.ListRunsRequest(), timeout=timeout_s).run_ids)
            if len(run_ids) != 1:
                return _choose(address, run_ids, as_json=as_json)
            request = runs_pb2.GetRunRequest(run=common_pb2.RunRef(run_id=run_ids[0]))
            run = stub.GetRun(request, timeout=timeout_s).run
        except grpc.RpcError as failure:
            sys.stderr.write(f"error: {_error(address, failure).message}\n")
            return 1
    if as_json:
        values = MessageToDict(run, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        print(json.dumps({**values, "waits_on": waits_on(_standing(run))}, indent=2))
    else:
        _print(run)
    return 0


def _choose(address: str, run_ids: list[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"runs": run_ids}, indent=2))
    elif run_ids:
        print("runs, name one of them with --run: " + ", ".join(run_ids))
    else:
        print(f"the service at {address} has no run yet")
    return 0


def _error(address: str, failure: Any) -> RolloutBufferError:  # noqa: ANN401 - RpcError's status is not in its type
    error = error_of(failure.code(), failure.details(), failure.trailing_metadata())
    if error.reason == "service_unreachable":
        return RolloutBufferError(f"the service at {address} does not answer ({error.message})")
    return error


def _standing(run: runs_pb2.Run) -> Standing:
    return Standing(
        paused=run.paused,
        queued=run.groups.queued.groups,
        needed=run.policy.batch_groups,
        pending=run.tasks.pending,
        leased=run.tasks.leased,
        published_version=run.published.version,
        max_staleness=run.policy.max_staleness if run.policy.HasField("max_staleness") else UNSET,
        engines=[(_state(engine), engine.loaded.version) for engine in run.engines],
    )


def _state(engine: weights_pb2.EngineReport) -> str:
    return weights_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()


# ── for people ───────────────────────────────────────────────────────────────


def _print(run: runs_pb2.Run) -> None:
    console = Console(highlight=False)
    paused = f", paused: {run.paused}" if run.paused else ""
    console.print(f"[bold]run {run.run_id}[/bold]{paused}")
    for name, value in _facts(run):
        console.print(f"  {name:<14} {value}")
    console.print(_group_table(run.groups))
    console.print(_task_table(run.tasks))
    if run.engines:
        console.print(_engine_table(run))
    for failure in run.failures[:5]:
        console.print(
            f"  failed: task {failure.task_id} after {failure.attempts} attempts: {failure.error}", markup=False
        )


def _facts(run: runs_pb2.Run) -> Iterator[tuple[str, str]]:
    policy, statistics, queued = run.policy, run.statistics, run.groups.queued
    gate = f"at most {policy.max_staleness}" if policy.HasField("max_staleness") else "no gate"
    overflow = runs_pb2.OverflowAction.Name(policy.overflow_action).removeprefix("OVERFLOW_ACTION_").lower()
    stale = runs_pb2.StaleAction.Name(policy.stale_action).removeprefix("STALE_ACTION_").lower()
    assembled = statistics.assembled_groups
    mean = f"{statistics.staleness_sum / assembled:.2f}" if assembled else "none yet"
    spanning = statistics.assembled_groups_spanning_versions
    steps = f"{run.next_step} assembled, {run.committed_steps} committed, {run.checkpointed_steps} checkpointed"
    queue = f"{queued.groups} of {policy.max_queued_groups} groups, {queued.bytes:,} bytes; when full: {overflow}"
    staleness = f"mean {mean}, max {statistics.staleness_max} ({gate}; too stale: {stale})"
    granted, returned, expired = statistics.leases_granted, statistics.leases_returned, statistics.leases_expired
    yield "waits on", waits_on(_standing(run))
    yield "weights", f"version {run.published.version} of epoch {run.epoch}"
    yield "steps", steps
    yield "queue", queue
    yield "batch", f"{policy.batch_groups} groups"
    yield "staleness", f"{staleness}, {spanning} of {assembled} groups span versions"
    yield "leases", f"{granted} granted, {returned} returned, {expired} expired"
    yield "feeder", f"cursor {run.cursor}"


def _group_table(ledger: runs_pb2.GroupLedger) -> Table:
    table = Table("groups", "groups", "samples", "tokens", "bytes", title=_balance("groups", balanced=ledger.balanced))
    for name in _DISPOSITIONS:
        amount = getattr(ledger, name)
        if amount.groups or name in {"accepted", "queued", "delivered", "trained"}:
            table.add_row(
                name, *(f"{value:,}" for value in (amount.groups, amount.samples, amount.tokens, amount.bytes))
            )
    return table


def _task_table(ledger: runs_pb2.TaskLedger) -> Table:
    table = Table(*_TASK_STATES, title=_balance("tasks", balanced=ledger.balanced))
    table.add_row(*(f"{getattr(ledger, state):,}" for state in _TASK_STATES))
    return table


def _balance(what: str, *, balanced: bool) -> str:
    return f"{what}, balanced" if balanced else f"[red]{what}, NOT BALANCED[/red]"


def _engine_table(run: runs_pb2.Run) -> Table:
    table = Table("engine", "state", "version", "reloads", "last reload", "errors", "last error", title="engines")
    for engine in run.engines:
        table.add_row(
            engine.engine_id,
            _state(engine),
            str(engine.loaded.version),
            str(engine.reloads),
            f"{engine.last_reload_ms} ms",
            str(engine.errors),
            engine.last_error[:60],
        )
    return table
