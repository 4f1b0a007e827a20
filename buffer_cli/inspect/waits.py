"""Waits of a run, as people read them: who waits on whom."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buffer_cli.inspect.tables import lease_table, size, span
from buffer_cli.output import print_facts
from buffer_cli.status.summary import headline
from buffer_service.domain.ops import EngineReport, RunView
from buffer_service.domain.ops.groups import TICKET_MS
from buffer_service.observability.diagnosis import SILENT_MS, Situation, waits_on
from rollout_buffer.v1 import inspect_pb2 as pb

_OPEN = (
    "Pulls and lease requests that are open at this moment are known to the processes that serve them alone: "
    "metric rollout_buffer_open_rpcs, methods PullBatch and LeaseTasks."
)


def print_waits(view: RunView, waits: pb.GetWaitsResponse) -> None:
    """The run, its trainer, blocked pushes, admission, workers, leases and engines."""
    situation = Situation.of(view)
    console = Console(highlight=False)
    facts = (
        ("waits on", waits_on(situation)),
        ("trainer", _trainer(view, situation)),
        ("blocked pushes", _blocked(waits)),
        ("admission", _admission(view, waits)),
        ("leases", _leases(waits)),
        ("engines", _engines(view, waits)),
    )
    print_facts(console, headline(view), facts)
    if waits.pushes:
        console.print(_push_table(waits))
    if waits.asked:
        console.print(_worker_table(waits))
    if waits.expiring:
        title = _of(len(waits.expiring), waits.leases, "leases, the first to expire first")
        console.print(lease_table(waits.expiring, waits.now_ms, title))
    behind = list(_behind(view, waits))
    if behind:
        console.print(_engine_table(behind))
    console.print(_OPEN, style="dim")


def _trainer(view: RunView, situation: Situation) -> str:
    """Needs of the next pull."""
    has = f"step {view.next_step} needs {situation.needed} groups for a {situation.unit}, {situation.queued} queued"
    enough = situation.queued >= situation.needed or situation.ready
    return f"{has}: the next pull is answered at once" if enough and not view.paused else f"{has}: the next pull waits"


def _blocked(waits: pb.GetWaitsResponse) -> str:
    if not waits.blocked_groups:
        return "none"
    since = _since(waits, waits.pushes[0])
    if waits.blocked_groups == 1:
        return f"1 group waits for room in the queue, for {since}"
    return f"{waits.blocked_groups:,} groups wait for room in the queue, the first one for {since}"


def _admission(view: RunView, waits: pb.GetWaitsResponse) -> str:
    """Rule that decides how a lease request is answered now."""
    admission = waits.admission
    if view.paused:
        return f"nothing is leased: the run is paused ({view.paused})"
    if view.draining:
        return "nothing is leased: the run is being drained"
    rooms = sorted(admission.rooms, key=lambda room: room.groups)
    told = (
        ", ".join(f"{max(0, room.groups):,} by {room.rule}" for room in rooms) or "any number: the policy sets no cap"
    )
    if rooms and rooms[0].groups <= 0:
        return f"nothing is leased: {rooms[0].rule} binds (room for groups: {told})"
    if not admission.due_tasks:
        waiting = (
            f"all pending tasks back off ({admission.backing_off_tasks:,})"
            if admission.backing_off_tasks
            else "no task is pending"
        )
        return f"nothing is leased: {waiting} (room for groups: {told})"
    return f"{_grantable(admission.due_tasks, rooms)} may be leased (room for groups: {told})"


def _grantable(due: int, rooms: Sequence[pb.AdmissionRoom]) -> str:
    """Number of due tasks that may be leased; `rooms` with the one that binds first."""
    if rooms and rooms[0].groups < due:
        return f"{rooms[0].groups:,} of {due:,} due tasks"
    return "1 task" if due == 1 else f"{due:,} tasks"


def _leases(waits: pb.GetWaitsResponse) -> str:
    if not waits.leases:
        return "none"
    first = waits.expiring[0].lease.expires_ms - waits.now_ms if waits.expiring else 0
    return f"{waits.leases:,}, the first to expire {f'in {span(first)}' if first >= 0 else 'is overdue'}"


def _behind(view: RunView, waits: pb.GetWaitsResponse) -> Iterator[tuple[EngineReport, str]]:
    """Engines that are not what they could be, and what that means."""
    for engine in view.engines:
        if engine.state == "stopped":
            continue
        said = []
        if engine.silent_ms >= SILENT_MS:
            said.append(f"not heard of for {span(engine.silent_ms)}")
        if engine.state != "ready":
            said.append(engine.state)
        if engine.loaded.version < view.published.version:
            said.append(f"{view.published.version - engine.loaded.version} behind the published version")
        if engine.loaded.version < waits.admission.required_version:
            said.append(f"gets no work below version {waits.admission.required_version}")
        if said:
            yield engine, ", ".join(said)


def _engines(view: RunView, waits: pb.GetWaitsResponse) -> str:
    known = sum(engine.state != "stopped" for engine in view.engines)
    behind = sum(1 for _ in _behind(view, waits))
    required = waits.admission.required_version
    needs = f"; work starts with version {required} or newer" if required else ""
    if not known:
        return "none is known"
    return f"{known:,}, {behind or 'none'} behind or not ready{needs}"


def _push_table(waits: pb.GetWaitsResponse) -> Table:
    title = _of(len(waits.pushes), waits.blocked_groups, "blocked pushes, in the order of the line")
    table = Table("task", "worker", "environment", "bytes", "waits for", "tried", title=title)
    for push in waits.pushes:
        tried = waits.now_ms - push.tried_ms
        table.add_row(
            push.lease_id or push.task_id or "?",
            push.worker_id or "?",
            escape(push.environment) or "-",
            size(push.bytes),
            _since(waits, push),
            f"{span(tried)} ago" + (", will lose its place" if tried > TICKET_MS else ""),
        )
    return table


def _since(waits: pb.GetWaitsResponse, push: pb.BlockedPush) -> str:
    return span(waits.now_ms - push.since_ms) if push.since_ms else "?"


def _worker_table(waits: pb.GetWaitsResponse) -> Table:
    title = _of(len(waits.asked), waits.workers, "workers, the last to ask for leases first")
    table = Table("worker", "process", "holds", "asked for leases", title=title)
    for worker in waits.asked:
        asked = span(max(0, waits.now_ms - worker.asked_ms))
        table.add_row(worker.worker_id, worker.instance_id or "-", f"{worker.leases:,}", f"{asked} ago")
    return table


def _engine_table(behind: list[tuple[EngineReport, str]]) -> Table:
    table = Table("engine", "worker", "version", "what", title="engines behind")
    for engine, what in behind:
        table.add_row(engine.engine_id, engine.worker_id, str(engine.loaded.version), what)
    return table


def _of(shown: int, all_of_them: int, what: str) -> str:
    return what if shown >= all_of_them else f"{what} ({shown:,} of {all_of_them:,})"
