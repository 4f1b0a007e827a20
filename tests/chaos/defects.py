"""Planted defects, as data: each breaks a promise of the product by one edit, and the chaos run has to find it."""

from dataclasses import dataclass

from tests.planted.change import Edit

LUA = "buffer_service/store/lua"


@dataclass(frozen=True)
class Defect:
    """A defect. `stores`: kinds of store at which it can show; every kind has its turn in an hour's run."""

    name: str
    edit: Edit
    stores: str = "external,embedded"


def _lua(name: str, file: str, at: str, put: str, stores: str = "external,embedded") -> Defect:
    return Defect(name, Edit(f"{LUA}/{file}", put, at, "instead"), stores)


DEFECTS = (
    # ── fences ───────────────────────────────────────────────────────────────
    _lua(
        "a former trainer's term is let in",
        "lib/runs/run.lua",
        "  if term ~= state.term or Run.is_of_another_run(ctx) then",
        "  if term > state.term or Run.is_of_another_run(ctx) then",
    ),
    _lua(
        "a resume begins no new term",
        "lib/batches/resuming.lua",
        "  state.term = state.term + 1\n",
        "",
    ),
    _lua(
        "a lease is extended by whoever asks",
        "tasks/extend.lua",
        "  if task and task.worker == worker_id and task.instance == instance_id\n    and Tasks",
        "  if task\n    and Tasks",
    ),
    _lua(
        "a lease lives on after the next attempt was given",
        "lib/tasks/tasks.lua",
        "task.incarnation ~= incarnation or task.attempt ~= attempt then",
        "task.incarnation ~= incarnation then",
    ),
    _lua(
        "leases expire at half of their time",
        "lib/tasks/tasks.lua",
        "leases, '-inf', format('(%d', ctx.now), 'LIMIT', 0, limit)",
        "leases, '-inf', format('(%d', ctx.now + ctx.policy.lease_ttl_ms / 2), 'LIMIT', 0, limit)",
    ),
    _lua(
        "the run's clock jumps with the host's",
        "lib/runs/run.lua",
        "math.max(ctx.stored_now, math.min(ctx.now, ctx.stored_now + Run.CLOCK_STEP_MS))",
        "math.max(ctx.stored_now, ctx.now)",
        # Of these two, the one whose clock can jump.
        "external",
    ),
    # ── permanence ───────────────────────────────────────────────────────────
    Defect(
        "a push is acknowledged although the store did not answer",
        Edit(
            "buffer_service/store/pushing.py",
            """            try:
                revision, published, outcomes = await self._calls.call(push)
            except RolloutBufferError as error:
                if error.reason != "store_unavailable":
                    raise
                for one in open_:
                    one.outcome = ops.Pushed(ops.PushKind.QUEUED, f"{one.facts.task_id}/{one.facts.incarnation}")
                return ops.PushResult(seen_revision, _outcomes(tries), ops.WeightVersion())
""",
            "            revision, published, outcomes = await self._calls.call(push)\n",
            "instead",
        ),
    ),
    Defect(
        "nobody asks whether the append came to the operating system",
        Edit(
            "buffer_service/store/transport/confirmation.py",
            "        if False and await self._appended.answer() != at.server:",
            "        if at.appends and await self._appended.answer() != at.server:",
            "instead",
        ),
    ),
    Defect(
        "nobody waits for the replica",
        Edit(
            "buffer_service/store/transport/confirmation.py",
            "        if False and wanted.replicas:",
            "        if wanted.replicas:",
            "instead",
        ),
        "sentinel",
    ),
    Defect(
        "the embedded store keeps no file",
        Edit(
            "buffer_service/store/embedded/server.py",
            'Durability.PROCESS: ("--appendonly", "no"),',
            'Durability.PROCESS: ("--appendonly", "yes", "--appendfsync", "no"),',
            "instead",
        ),
        "embedded",
    ),
    _lua(
        "payloads of accepted groups are deleted",
        "groups/push.lua",
        "    if not is_written and not Staging.KEPT[outcome] and not is_repeat then",
        "    if not is_written and not is_repeat then",
    ),
    _lua(
        "steps are freed before they are checkpointed",
        "lib/batches/commit.lua",
        "math.max(state.checkpointed_steps, state.committed_steps - policy.retained_steps)",
        "math.max(state.checkpointed_steps, state.committed_steps)",
    ),
    _lua(
        "a completed task is not written",
        "groups/push.lua",
        "  Run.keep_back(ctx, 'HSET', key('tasks'), task_id, pack(task))\n",
        "",
    ),
    # ── steps ────────────────────────────────────────────────────────────────
    _lua(
        "a repeated pull gets another rank's shard",
        "batches/pull.lua",
        "  return answer(header, stored, 1)",
        "  rank = (rank + 1) % world_size\n  return answer(header, stored, 1)",
    ),
    _lua(
        "discarded groups are queued again",
        "lib/batches/resuming.lua",
        "        Groups.finish(ctx, group, from, 'discarded')",
        "        Groups.queue(ctx, Record.clamp(ctx, group), from)",
    ),
    _lua(
        "a replayed step stays trained in the ledger",
        "lib/batches/resuming.lua",
        "    Batches.move_step(ctx, header, 'trained', 'delivered')\n",
        "",
    ),
    # ── versions and staleness ───────────────────────────────────────────────
    _lua(
        "versions of an abandoned timeline are not clamped",
        "lib/runs/timeline.lua",
        "    if fork[1] > term and fork[2] < version then",
        "    if false then",
    ),
    _lua(
        "the gate lets in one version too old",
        "batches/pull.lua",
        "    1000 * (train_version - policy.max_staleness), most)",
        "    1000 * (train_version - policy.max_staleness - 1), most)",
    ),
    _lua(
        "a version is published anew with another manifest",
        "weights/publish.lua",
        "if not is_repeat and version <= state.version then",
        "if not is_repeat and version < state.version then",
    ),
    # ── ledgers, caps, the cursor ────────────────────────────────────────────
    _lua(
        "an overflow is not counted",
        "lib/groups/groups.lua",
        "  Groups.finish(ctx, group, 'queued', 'dropped_overflow')\n",
        "  Groups.trash(ctx, group)\n",
        "external",
    ),
    _lua(
        "the queue takes three groups too many",
        "lib/groups/groups.lua",
        "  return Queue.total(ctx) + groups <= policy.max_queued_groups",
        "  return Queue.total(ctx) + groups <= policy.max_queued_groups + 3",
    ),
    _lua(
        "two feeders may feed the same prompts",
        "tasks/submit.lua",
        "if expected_cursor ~= state.cursor then",
        "if false then",
    ),
    _lua(
        "a repeated submit is a new one",
        "tasks/submit.lua",
        "  if last_request == request_id then",
        "  if false then",
    ),
    _lua(
        "a resume forgets the feeder's state",
        "lib/batches/resuming.lua",
        "  local feeder = call('HGET', RUN, 'feeder') or ''",
        "  local feeder = ''",
    ),
)
