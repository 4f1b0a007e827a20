"""State of a run, as people read it."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from buffer_cli.output import count, print_fact, print_facts
from buffer_cli.status.staleness import print_estimate
from buffer_service.domain.ops import EngineReport, RunView
from buffer_service.domain.policy import UNSET, RunPolicy
from buffer_service.observability.control import lowered, target
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_service.observability.estimate import Estimate
from buffer_service.observability.filters import filtered, filters, passed_over, recent_acceptance, starved
from buffer_service.observability.ledgers import UNITS, groups_balanced, tasks_balanced
from buffer_service.observability.relaying import relaying, written
from buffer_service.rules.transitions import GroupState, TaskState

_ALWAYS_SHOWN = frozenset({"accepted", GroupState.QUEUED, GroupState.DELIVERED, GroupState.TRAINED})
_SHOWN_OF_ENVIRONMENTS = ("accepted", *(state for state in GroupState if state in _ALWAYS_SHOWN))
MAX_FAILURES = 5


def print_run(console: Console, view: RunView, estimate: Estimate) -> None:
    """Facts, staleness, ledgers, engines and failures."""
    print_facts(console, headline(view), _facts(view))
    print_estimate(console, estimate)
    console.print(_group_table(view))
    if view.stages:
        console.print(_stage_table(view))
    for sentence in passed_over(view):
        print_fact(console, "passed over", sentence)
    if view.environments.keys() - {""}:
        console.print(_environment_table(view))
    console.print(_task_table(view))
    if any(work.environment or work.failed_attempts or work.failed_samples for work in view.environment_work):
        console.print(_work_table(view))
    if view.engines:
        console.print(_engine_table(view.engines))
    for engine in view.engines:
        if engine.errors:
            print_fact(console, "errors", f"{engine.engine_id}: {engine.errors:,}, the last: {engine.last_error}")
    for failure in view.failures[:MAX_FAILURES]:
        print_fact(console, "failed", f"task {failure.task_id} after {failure.attempts} attempts: {failure.error}")


def headline(view: RunView) -> str:
    """Name of the run with markup, and whether it is held."""
    return f"[bold]run {view.run_id}[/bold]{state(view)}"


def state(view: RunView) -> str:
    """Remark that the run is paused or draining; empty where it is neither."""
    paused = f", paused: {view.paused}" if view.paused else ""
    return f"{paused}{', draining' if view.draining else ''}"


def _facts(view: RunView) -> Iterator[tuple[str, str]]:
    policy, statistics = view.policy, view.statistics
    granted, returned, expired = (statistics[f"leases_{name}"] for name in ("granted", "returned", "expired"))
    steps = f"{view.next_step} assembled, {view.committed_steps} committed, {view.checkpointed_steps} checkpointed"
    yield "waits on", waits_on(Situation.of(view))
    if policy.preset:
        yield "preset", policy.preset
    yield "weights", f"version {view.published.version} of term {view.term}"
    yield "steps", steps
    yield "queue", _queue(view)
    yield "batch", _batch(policy)
    if policy.max_uses > 1 or view.reuse.drawn:
        yield "reuse", _reuse(view)
    yield "staleness", _staleness(view)
    if policy.target_staleness_milli:
        yield "target", target(view)
        yield "in effect", lowered(view) or "everything as stated"
    yield (
        "leases",
        f"{granted} granted, {returned} returned, {expired} expired, {statistics['leases_cancelled']} cancelled",
    )
    if filters(policy):
        passing = f"{recent_acceptance(view):.0%} of the recent groups pass{', TOO FEW' if starved(view) else ''}"
        reasons = ", ".join(f"{count} for {reason}" for reason, count in filtered(view).items())
        yield "filter", f"{passing}; filtered so far: {reasons}"
    yield from _quotas(view)
    columns = [f"{one.added_bytes:,} of {one.name}" for one in view.stages if one.added_bytes]
    if columns:
        yield "bytes of columns", ", ".join(columns)
    if view.blob_bytes:
        yield "blobs", f"{view.blob_bytes:,} of {view.max_blob_bytes:,} bytes"
    yield "pushed directly", written(view)
    for what, clients in relaying(view).items():
        yield f"relayed {what}", clients
    for engines, came_from in _weights(view):
        yield f"weights of {engines}", came_from
    yield "feeder", f"cursor {view.cursor}"


def _weights(view: RunView) -> Iterator[tuple[str, str]]:
    """Engines whose last version was fetched, and where it came from and why; those of one worker together."""
    by_source: dict[str, list[str]] = {}
    for engine in view.engines:
        if engine.weights_from:
            by_source.setdefault(engine.weights_from, []).append(engine.engine_id)
    for came_from, engine_ids in by_source.items():
        more = f" and {len(engine_ids) - 1} more" if len(engine_ids) > 1 else ""
        yield f"{engine_ids[0]}{more}", came_from


def _queue(view: RunView) -> str:
    policy, queued = view.policy, view.groups["queued"]
    forming = view.groups["forming"].groups
    in_step = f", {forming} forming" if forming else ""
    return (
        f"{queued.groups} of {policy.max_queued_groups} groups{in_step}, {queued.bytes:,} bytes; "
        f"order: {policy.order}; when full: {policy.overflow_action}"
    )


def _batch(policy: RunPolicy) -> str:
    tokens = f", at most {policy.batch_tokens:,} tokens" if policy.batch_tokens else ""
    micro_batches = f", in micro-batches of {policy.micro_batch_groups} a rank" if policy.micro_batch_groups else ""
    return f"{policy.batch_groups} groups{tokens}{micro_batches}"


def _reuse(view: RunView) -> str:
    policy, reuse = view.policy, view.reuse
    most = policy.reused_groups(policy.batch_groups)
    bounds = (
        f"up to {policy.max_uses} uses, at most {most} beside a batch and {policy.reuse_max_staleness} versions old"
    )
    ended = f"{reuse.trained:,} trained, {reuse.given_back:,} given back, {reuse.lost:,} lost"
    return f"{bounds if most else 'off'}; {reuse.reusable_groups:,} groups may be used again; uses so far: {ended}"


def _staleness(view: RunView) -> str:
    policy, statistics = view.policy, view.statistics
    assembled = statistics["assembled_groups"]
    mean = f"{statistics['staleness_sum'] / assembled:.2f}" if assembled else "none yet"
    gate = f"at most {policy.max_staleness}" if policy.max_staleness != UNSET else "no gate"
    measure = "" if policy.staleness_measure == "head" else f" by {policy.staleness_measure}"
    spanning = f"{statistics['assembled_groups_spanning_versions']} of {assembled} groups span versions"
    return (
        f"mean {mean}, max {statistics['staleness_max']} "
        f"({gate}{measure}; too stale: {policy.stale_action}), {spanning}"
    )


def _quotas(view: RunView) -> Iterator[tuple[str, str]]:
    held = [view.groups[name] for name in ("queued", "forming", "delivered")]
    parts = []
    for unit in ("groups", "tokens", "bytes"):
        quota = getattr(view.policy, f"quota_{unit}")
        if quota:
            parts.append(f"{sum(getattr(amount, unit) for amount in held):,} of {quota:,} {unit}")
    if parts:
        yield "quota", "; ".join(parts)


def _group_table(view: RunView) -> Table:
    table = _table("groups", *UNITS, title=_balance("groups", balanced=groups_balanced(view)))
    for name in ("accepted", *GroupState):
        amount = view.groups[name]
        if amount.groups or name in _ALWAYS_SHOWN:
            table.add_row(name, *(count(getattr(amount, unit)) for unit in UNITS))
    return table


def _stage_table(view: RunView) -> Table:
    """Stages in their order: who is behind, and how long a group takes there."""
    table = _table("stage", "waiting", "held", "added", "failed leases", "mean ms", "asked", title="stages")
    for one in view.stages:
        mean = f"{one.busy_ms / one.added:,.0f}" if one.added else ""
        asked = "never" if one.asked_ms is None else f"{one.asked_ms / 1000:.0f} s ago"
        table.add_row(one.name, *map(count, (one.waiting, one.leased, one.added, one.failed)), mean, asked)
    return table


def _environment_table(view: RunView) -> Table:
    """Groups of each environment by what became of them; states that are rare share a column, by name."""
    table = _table("environment", *_SHOWN_OF_ENVIRONMENTS, "other", title="groups by environment")
    for environment, ledger in sorted(view.environments.items()):
        others = (name for name in GroupState if name not in _ALWAYS_SHOWN and ledger[name].groups)
        table.add_row(
            escape(environment) or "(none)",
            *(count(ledger[name].groups) for name in _SHOWN_OF_ENVIRONMENTS),
            ", ".join(f"{name} {count(ledger[name].groups)}" for name in others),
        )
    table.columns[-1].overflow, table.columns[-1].no_wrap = "fold", False
    return table


def _task_table(view: RunView) -> Table:
    names = ("submitted", *TaskState)
    table = _table(*names, title=_balance("tasks", balanced=tasks_balanced(view)))
    table.add_row(*(count(view.tasks[name]) for name in names))
    return table


def _work_table(view: RunView) -> Table:
    """Leases of each environment, what failed of them, and what its limit keeps it from."""
    columns = ("leases", "failed leases", "failed tasks", "failed samples", "next lease")
    table = _table("environment", *columns, title="work")
    for work in view.environment_work:
        counts = (work.starts, work.failed_attempts, work.failed_tasks, work.failed_samples)
        after = f"in {work.limited_for_ms / 1_000:.1f} s" if work.limited_for_ms else "now"
        table.add_row(escape(work.environment) or "(none)", *map(count, counts), after)
    return table


def _table(first: str, *columns: str, title: str) -> Table:
    """A table that fits 80 columns: names in its first one go on in the next line, and figures are never cut."""
    table = Table(Column(first, overflow="fold"), title=title)
    for name in columns:
        # A heading may be of several lines, and a figure may not.
        table.add_column(name, min_width=max(map(len, name.split())))
    return table


def _balance(what: str, *, balanced: bool) -> str:
    return f"{what}, balanced" if balanced else f"[red]{what}, NOT BALANCED[/red]"


def _engine_table(engines: Sequence[EngineReport]) -> Table:
    grouped = any(engine.membership for engine in engines)
    columns = ("state", "version", "samples", *(("group",) if grouped else ()), "reloads", "last reload", "silent")
    table = _table("engine", *columns, title="engines")
    table.columns[1].no_wrap = True  # a state is one word
    for engine in engines:
        table.add_row(
            engine.engine_id,
            engine.state,
            str(engine.loaded.version),
            _samples(engine),
            *((_process_group(engine),) if grouped else ()),
            f"{engine.reloads:,}",
            _span(engine.last_reload_ms),
            f"{engine.silent_ms // 1000} s",
        )
    return table


def _span(milliseconds: int) -> str:
    return f"{milliseconds} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.0f} s"


def _samples(engine: EngineReport) -> str:
    """Samples that run, of those that may, and the KV cache in use."""
    of = f" of {engine.max_running_samples}" if engine.max_running_samples else ""
    cache = f", KV {engine.kv_usage_milli / 1000:.0%}" if engine.kv_usage_milli else ""
    return f"{engine.running_samples}{of}{cache}"


def _process_group(engine: EngineReport) -> str:
    """The process group that it is in, and the version that it is ready to receive there."""
    if not engine.membership:
        return "-"
    return f"{engine.membership}, ready for {engine.prepared.version}" if engine.prepared else str(engine.membership)
