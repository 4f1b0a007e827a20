"""Tasks, groups, samples and steps, as people read them."""

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from buffer_wire.enums import word
from rollout_buffer.v1 import groups_pb2
from rollout_buffer.v1 import inspect_pb2 as pb

_UNITS_S = ((86_400, "d"), (3_600, "h"), (60, "min"))
MAX_ERROR_CHARS = 60


def span(milliseconds: int) -> str:
    """A length of time in the unit that fits: 240 ms, 12.3 s, 4.5 min."""
    seconds = abs(milliseconds) / 1000
    sign = "-" if milliseconds < 0 else ""
    for unit_s, name in _UNITS_S:
        if seconds >= 2 * unit_s:
            return f"{sign}{seconds / unit_s:.1f} {name}"
    return f"{sign}{seconds:.1f} s" if seconds >= 1 else f"{milliseconds} ms"


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    value = float(count)
    for name in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{count} B" if name == "B" else f"{value:.1f} {name}"
        value /= 1024
    return f"{value:.1f} GiB"


def place(value: int) -> str:
    """A place of a group in words."""
    return word(pb.GroupPlace, value).replace("_", " ")


def state(task: pb.TaskInfo) -> str:
    """State of a task, in words."""
    return word(pb.TaskState, task.state)


# ── tasks ────────────────────────────────────────────────────────────────────


def task_table(which: str, tasks: Sequence[pb.TaskInfo], now_ms: int) -> Table:
    """Tasks of one set."""
    if which == "leased":
        return lease_table(tasks, now_ms)
    return _pending_table(tasks, now_ms) if which == "pending" else _ended_table(tasks)


def lease_table(leases: Sequence[pb.TaskInfo], now_ms: int, title: str = "leases") -> Table:
    """Leased tasks."""
    columns = ("lease", "environment", "worker", "leased for", "expires in", "heard", "weights", "continues")
    table = Table(*columns, title=title)
    for task in leases:
        lease = task.lease
        left = lease.expires_ms - now_ms
        table.add_row(
            lease.lease_id,
            escape(task.environment) or "-",
            lease.worker_id,
            span(now_ms - task.leased_ms),
            span(left) if left >= 0 else f"overdue {span(-left)}",
            f"{span(max(0, now_ms - lease.heard_ms))} ago",
            str(lease.version),
            _partial_rollout(task),
        )
    return table


def _pending_table(tasks: Sequence[pb.TaskInfo], now_ms: int) -> Table:
    columns = ("task", "environment", "priority", "incarnation", "leases", "failures", "due", "continues", "last error")
    table = Table(*columns, title="pending tasks")
    for task in tasks:
        table.add_row(
            task.task_id,
            escape(task.environment) or "-",
            str(task.priority),
            str(task.incarnation),
            str(task.attempt),
            str(task.failures),
            _due(task, now_ms),
            _partial_rollout(task),
            escape(task.error[:MAX_ERROR_CHARS]) or "-",
        )
    return table


def _due(task: pb.TaskInfo, now_ms: int) -> str:
    if task.HasField("not_before_ms") and task.not_before_ms > now_ms:
        return f"in {span(task.not_before_ms - now_ms)}"
    return "now, came back" if task.returned else "now"


def _partial_rollout(task: pb.TaskInfo) -> str:
    if not task.partial_rollout_tokens:
        return "-"
    head = f" from {task.partial_rollout_head}" if task.HasField("partial_rollout_head") else ""
    return f"{task.partial_rollout_tokens:,} tokens{head}"


def _ended_table(tasks: Sequence[pb.TaskInfo]) -> Table:
    table = Table("task", "environment", "state", "incarnation", "leases", "why", title="tasks that ended in no batch")
    for task in tasks:
        table.add_row(
            task.task_id,
            escape(task.environment) or "-",
            state(task),
            str(task.incarnation),
            str(task.attempt),
            escape(_why(task)),
        )
    return table


def _why(task: pb.TaskInfo) -> str:
    if task.state == pb.TASK_STATE_FAILED:
        return task.error[:MAX_ERROR_CHARS]
    return "filtered" if task.filtered else "its group was dropped, rejected, discarded or lost"


def task_facts(task: pb.TaskInfo, now_ms: int) -> Iterator[tuple[str, str]]:
    """One task, fact by fact."""
    yield "state", state(task) + (f", {_due(task, now_ms)}" if task.state == pb.TASK_STATE_PENDING else "")
    yield "environment", f"{task.environment or '-'}, priority {task.priority}"
    yield (
        "attempts",
        f"leases of incarnation {task.incarnation}: {task.attempt}, ended in an error or an expiry: {task.failures}",
    )
    if task.HasField("lease"):
        lease = task.lease
        yield "lease", f"{lease.lease_id}, for {span(now_ms - task.leased_ms)}, weights {lease.version}"
        yield "worker", f"{lease.worker_id}, process {lease.instance_id}"
        heard = span(max(0, now_ms - lease.heard_ms))
        yield "heartbeat", f"{heard} ago, expires in {span(lease.expires_ms - now_ms)}"
    if task.partial_rollout_tokens:
        yield "partial_rollout", f"{_partial_rollout(task)}, {size(task.partial_rollout_bytes)}"
    if task.error:
        yield "last error", task.error
    if task.group_id:
        yield "group", f"{task.group_id}, {_place_of(task)}"
    if task.leaseless:
        yield "made by", "a push without a lease"


def _place_of(task: pb.TaskInfo) -> str:
    if task.filtered:
        return "filtered"
    return {
        pb.GROUP_PLACE_UNSPECIFIED: "where it is was not noted when it was accepted",
        pb.GROUP_PLACE_IN_STEP: "in a step (`inspect groups --step N` lists each)",
        pb.GROUP_PLACE_ENDED: "ended: dropped, rejected, discarded or lost",
    }.get(task.place, place(task.place))


# ── groups ───────────────────────────────────────────────────────────────────


def group_table(step: int | None, groups: Sequence[pb.GroupInfo]) -> Table:
    """Groups of the queue, or of a step."""
    where = () if step is None else ("micro_batch", "rank")
    title = "queued groups" if step is None or not groups else f"groups of step {step}, {place(groups[0].place)}"
    columns = ("group", *where, "environment", "samples", "tokens", "longest", "reward", "versions", "mean", "stored")
    table = Table(*columns, title=title)
    for group in groups:
        table.add_row(
            group.group_id,
            *((str(group.micro_batch), str(group.rank)) if where else ()),
            escape(group.environment) or "-",
            str(group.samples),
            f"{group.tokens:,}",
            f"{group.longest_tokens:,}",
            f"{group.reward_milli / 1000 / max(1, group.samples):.3f}",
            _versions(group.head_version, group.tail_version),
            f"{group.mean_version_milli / 1000:.2f}",
            size(group.bytes),
        )
    return table


def _versions(head: int, tail: int) -> str:
    return str(head) if head == tail else f"{head}–{tail}"


def group_facts(reply: pb.GetGroupResponse) -> Iterator[tuple[str, str]]:
    """One group, fact by fact; its samples must be there."""
    header, samples = reply.header, reply.header.samples
    yield "place", _place_of(reply.task)
    yield "environment", header.environment or "-"
    yield "made by", f"worker {header.worker_id or '?'}, lease {header.lease_id or 'none'}"
    tokens, responses = sum(one.tokens for one in samples), [one.tokens - one.prompt_len for one in samples]
    yield "samples", f"{reply.samples}, {tokens:,} tokens, responses of {min(responses):,} to {max(responses):,}"
    rewards = [one.reward for one in samples]
    mean = sum(rewards) / len(rewards)
    yield "rewards", f"mean {mean:.3f}, {min(rewards):.3f} to {max(rewards):.3f}"
    stamps = [span.version for one in samples for span in one.spans]
    newest, oldest = max(map(_stamp, stamps)), min(map(_stamp, stamps))
    yield "weights", f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]} (term.version, as pushed)"
    yield "columns", ", ".join(column.name for column in header.columns)
    yield "stored", size(reply.bytes)


def _stamp(version: object) -> tuple[int, int]:
    return version.term, version.version  # type: ignore[attr-defined]


def sample_table(samples: Sequence[groups_pb2.Sample]) -> Table:
    """Samples of a group."""
    columns = ("sample", "prompt", "response", "loss tokens", "turns", "reward", "ended by", "versions of its tokens")
    table = Table(*columns, title="samples")
    for index, sample in enumerate(samples):
        table.add_row(
            str(index),
            f"{sample.prompt_len:,}",
            f"{sample.tokens - sample.prompt_len:,}",
            f"{sample.loss_tokens:,}",
            str(len(sample.turns) or 1),
            f"{sample.reward:.3f}",
            word(groups_pb2.FinishReason, sample.finish_reason),
            ", ".join(f"{one.start}–{one.end - 1}: {one.version.term}.{one.version.version}" for one in sample.spans),
        )
    return table


def print_tokens(token_ids: Sequence[int], sample: groups_pb2.Sample, index: int, first: int, *, ids: bool) -> None:
    """Tokens of a sample: which these are, its reward, and with `ids` the token ids."""
    last = first + len(token_ids) - 1
    of = f"of {sample.tokens:,}, the first {sample.prompt_len:,} of which are the prompt"
    if not token_ids:
        print(f"sample {index}: no token from {first} on, {of}")
        return
    print(f"sample {index}, reward {sample.reward:.3f}, tokens {first} to {last} {of}:")
    for at in range(0, len(token_ids) if ids else 0, 16):
        print(f"  {first + at:>7}  {' '.join(map(str, token_ids[at : at + 16]))}")


# ── steps ────────────────────────────────────────────────────────────────────


def step_table(steps: Sequence[pb.StepInfo]) -> Table:
    """Steps, newest first."""
    columns = (
        "step",
        "state",
        "trained by",
        "groups",
        "micro_batches",
        "ranks",
        "samples",
        "tokens",
        "staleness",
        "stored",
    )
    table = Table(*columns, title="batches, newest first")
    for step in steps:
        table.add_row(
            str(step.step),
            place(step.place),
            f"version {step.train_version}",
            f"{step.groups:,} of {step.target_groups:,}",
            str(step.micro_batches),
            str(step.world_size),
            f"{step.samples:,}",
            f"{step.tokens:,}",
            f"mean {step.staleness_mean_milli / 1000:.2f}, max {step.staleness_max}",
            size(step.bytes),
        )
    return table
