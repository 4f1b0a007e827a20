"""Commands on tasks and leases."""

from collections.abc import Sequence
from typing import cast

from buffer_service.commands.replies import pack, text
from buffer_service.domain import ops
from buffer_service.domain.command import Command, Fields
from buffer_service.domain.ops import Buffer
from buffer_wire import limits
from buffer_wire.payloads.keys import new_nonce, part_count, payload_key
from buffer_wire.revision import NO_REVISION, Revision

NO_HEAD = -1


def submit(run_id: str, submit: ops.Submit, *, seen_revision: Revision = NO_REVISION) -> Command[ops.Submitted]:
    """Add tasks and move the cursor.

    Raises StaleTerm, CursorConflict, PendingFull, RunPaused, InvalidField (a task id that exists).
    """
    tasks = [
        (task.task_id, task.priority, task.spec, task.environment, task.expected_tokens, task.metadata)
        for task in submit.tasks
    ]
    cursors = (submit.expected_cursor, submit.cursor)
    arguments = pack(seen_revision, submit.term, submit.request_id, *cursors, submit.feeder_state, tasks)
    return Command(run_id, "submit", arguments, _submitted)


def lease(
    run_id: str, ask: ops.LeaseAsk, *, seen_revision: Revision = NO_REVISION
) -> Command[tuple[ops.Leased, Sequence[str]]]:
    """Lease tasks: the grants, without their partial rollouts, and the payload keys of these, "" where there is none.

    A store's `lease` fetches them too.
    """
    arguments = pack(
        seen_revision,
        ask.worker_id,
        ask.instance_id,
        ask.request_id,
        ask.engine_id,
        ask.loaded.term,
        ask.loaded.version,
        ask.max_tasks,
        ask.message_bytes,
        ask.sink.value,
        int(ask.would_load),
    )
    return Command(run_id, "lease", arguments, _leased, again=arguments)


def extend(
    run_id: str,
    worker_id: str,
    instance_id: str,
    lease_ids: Sequence[str],
    *,
    seen_revision: Revision = NO_REVISION,
) -> Command[ops.Extended]:
    """Prolong leases that are live."""
    return Command(run_id, "extend", pack(seen_revision, worker_id, instance_id, list(lease_ids)), _extended)


def give_back(
    run_id: str,
    worker_id: str,
    instance_id: str,
    returns: Sequence[ops.LeaseReturn],
    *,
    seen_revision: Revision = NO_REVISION,
) -> Command[ops.Returned]:
    """Return leases with their partial rollouts."""
    payloads, packed = [], []
    for given in returns:
        key = ""
        if given.partial_rollout:
            size = len(given.partial_rollout)
            key = payload_key(run_id, new_nonce(), given.checksum, size, part_count(size))
            payloads.append((key, given.partial_rollout))
        head = given.head or ops.WeightVersion(0, NO_HEAD)
        packed.append((given.lease_id, given.kind.value, given.error, key, head.term, head.version, given.tokens))
    arguments = pack(seen_revision, worker_id, instance_id, packed)
    return Command(run_id, "give_back", arguments, _returned, payloads)


def write_blob(
    run_id: str, sha256: str, data: Buffer, *, seen_revision: Revision = NO_REVISION
) -> Command[ops.WrittenBlob]:
    """Keep a blob, once. Raises BlobsFull."""
    arguments = pack(seen_revision, sha256, bytes(data), limits.MAX_BLOBS_BYTES)
    return Command(run_id, "write_blob", arguments, lambda _, fields: ops.WrittenBlob(*fields))


def read_blob(run_id: str, sha256: str) -> Command[bytes]:
    """The bytes of a blob. Raises UnknownBlob."""

    def read(_tag: str, fields: Fields) -> bytes:
        return cast("bytes", fields[0])

    return Command(run_id, "read_blob", pack(sha256), read, reads=True, acknowledges=False)


def lease_groups(run_id: str, ask: ops.StageAsk, *, seen_revision: Revision = NO_REVISION) -> Command[ops.StageLeased]:
    """Lease groups that wait in a stage to a worker of it."""
    arguments = pack(seen_revision, ask.stage, ask.worker_id, ask.instance_id, ask.request_id, ask.max_groups)
    return Command(run_id, "lease_groups", arguments, _groups_leased)


def _groups_leased(_tag: str, fields: Fields) -> ops.StageLeased:
    revision, ttl_ms, term, version, waiting, grants, paused = fields
    leases = [
        ops.StageLease(
            text(lease_id),
            text(group_id),
            text(key),
            [ops.AddedColumns(text(stage), text(its)) for stage, its in added],
            sequence,
            head,
            tail,
        )
        for lease_id, group_id, sequence, head, tail, key, added in grants
    ]
    return ops.StageLeased(revision, leases, ttl_ms, waiting, ops.WeightVersion(term, version), text(paused))


def _submitted(_tag: str, fields: Fields) -> ops.Submitted:
    revision, cursor, pending, task_ids = fields
    return ops.Submitted(revision, cursor, [text(task_id) for task_id in task_ids], pending)


def _leased(_tag: str, fields: Fields) -> tuple[ops.Leased, Sequence[str]]:
    revision, wait, required, ttl_ms, term, version, grants, wanted, limited, limited_for_ms = fields
    leased = ops.Leased(
        revision=revision,
        grants=[_grant(*grant) for grant in grants],
        wait=ops.LeaseWait(text(wait)) if wait else None,
        published=ops.WeightVersion(term, version),
        required_version=required,
        ttl_ms=ttl_ms,
        wanted=ops.Wanted(ops.WeightVersion(wanted[0], wanted[1]), wanted[2]) if wanted else None,
        limited_environment=text(limited),
        limited_for_ms=limited_for_ms,
    )
    return leased, [text(key) for *_, key, _name, _pinned in grants]


def _grant(
    task_id: bytes, incarnation: int, attempt: int, spec: bytes, _key: bytes, name: bytes, pinned: Sequence[int]
) -> ops.LeaseGrant:
    lease_id = f"{text(task_id)}/{incarnation}/{attempt}"
    weights = ops.WeightVersion(*pinned) if pinned else None
    return ops.LeaseGrant(lease_id, text(name), incarnation, attempt, spec, b"", weights)


def _extended(_tag: str, fields: Fields) -> ops.Extended:
    revision, ttl_ms, states = fields
    return ops.Extended(revision, [ops.LeaseState(text(state)) for state in states], ttl_ms)


def _returned(_tag: str, fields: Fields) -> ops.Returned:
    revision, outcomes = fields
    return ops.Returned(revision, [ops.ReturnOutcome(text(outcome)) for outcome in outcomes])
