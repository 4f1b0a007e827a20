"""Commands on batches: pull, reject, report_lost, commit, checkpoint, resume."""

from collections.abc import Sequence

from buffer_service.commands.replies import nothing, pack, text, unpack
from buffer_service.commands.runs import free
from buffer_service.domain import ops
from buffer_service.domain.command import Command, Fields
from buffer_service.rules.groups import RECORD
from buffer_wire.errors import InvalidField
from buffer_wire.revision import NO_REVISION, Revision

UNSET = -1
_ADDED = RECORD.index("added")
"""Place in a group's record that only groups of a run with stages have, and what is used again."""
_USES = RECORD.index("uses")
"""Place in a group's record that only what is used again has."""


def pull(
    run_id: str, pull: ops.Pull, *, seen_revision: Revision = NO_REVISION, portion: int = ops.TAKEN_AT_ONCE
) -> Command[ops.Batch | ops.Short]:
    """Close a micro-batch of a step if it is its turn and enough is queued, or return the stored one. Evicts what is
    too stale first; one call takes at most `portion` groups out of the queue, and evicts at most ops.PORTION.

    Raises StaleTerm, StepAhead, WorldSizeMismatch, ReplayGap, RunPaused, FailureBudgetExceeded, InvalidField
    (train_version, rank, micro-batch, batch_groups, world_size).
    """
    if not 0 <= pull.rank < pull.world_size:
        raise InvalidField("rank", pull.rank, f"below world_size {pull.world_size}")
    train_version = UNSET if pull.train_version is None else pull.train_version
    batch_groups = UNSET if pull.batch_groups is None else pull.batch_groups
    who = (pull.term, pull.step, pull.rank, pull.world_size)
    what = (seen_revision, *who, train_version, pull.micro_batch, batch_groups, portion)

    def unpacked(tag: str, fields: Fields) -> ops.Batch | ops.Short:
        return _short(pull.step, fields) if tag == "short" else _batch(fields)

    return Command(run_id, "pull", pack(*what, 0), unpacked, again=pack(*what, 1))


def report_lost(run_id: str, term: int, step: int, payload_keys: Sequence[str]) -> Command[None]:
    """Say that a pull of that term found payloads gone: settle the groups of the step that have these as lost, reopen
    their tasks. Raises StaleTerm.
    """
    return Command(run_id, "report_lost", pack(term, step, list(payload_keys)), nothing)


def reject(run_id: str, reject: ops.Reject, *, seen_revision: Revision = NO_REVISION) -> Command[ops.Rejected]:
    """Give groups of a step back, which ends them; the step is to get as many others. A repeat rejects nothing more.

    Raises StaleTerm, StepAhead, InvalidField (step, group_ids), which rejects nothing.
    """
    arguments = pack(seen_revision, reject.term, reject.step, list(reject.group_ids), reject.reason)
    return Command(run_id, "reject", arguments, _rejected, trash=True)


def commit(
    run_id: str, term: int, through_step: int, *, seen_revision: Revision = NO_REVISION
) -> Command[tuple[Revision, int]]:
    """Settle delivered groups as trained: (revision, committed_steps). Raises StaleTerm, StepAhead."""
    return Command(run_id, "commit", pack(seen_revision, term, through_step), _steps, rest=free(run_id))


def checkpoint(
    run_id: str, term: int, through_step: int, *, seen_revision: Revision = NO_REVISION
) -> Command[tuple[Revision, int]]:
    """Free replay data and tombstones: (revision, checkpointed_steps). Raises StaleTerm, NotCommitted."""
    arguments = pack(seen_revision, term, through_step, UNSET)
    return Command(run_id, "checkpoint", arguments, _checkpointed, rest=free(run_id), trash=True)


def commit_and_checkpoint(
    run_id: str, term: int, commit_through: int, through_step: int, *, seen_revision: Revision = NO_REVISION
) -> Command[tuple[int, int]]:
    """Do as `commit` and then `checkpoint` do, in one call: (committed_steps, checkpointed_steps). Raises StaleTerm,
    StepAhead; and NotCommitted, which undoes no commit.
    """
    arguments = pack(seen_revision, term, through_step, commit_through)
    return Command(run_id, "checkpoint", arguments, _both, rest=free(run_id), trash=True)


def resume(run_id: str, resume: ops.Resume) -> Command[ops.Resumed]:
    """Take the run over; clears a pause. Raises ReplayGap, StepAhead."""
    step = UNSET if resume.next_step is None else resume.next_step
    arguments = pack(step, resume.mode.value, resume.request_id, int(resume.allow_regenerate))
    return Command(run_id, "resume", arguments, lambda _, fields: ops.Resumed(*fields), again=arguments)


def _rejected(_tag: str, fields: Fields) -> ops.Rejected:
    revision, rejected, missing, step, micro_batch, final, *totals = fields
    return ops.Rejected(revision, rejected, missing, step, micro_batch, bool(final), *totals)


def _steps(_tag: str, fields: Fields) -> tuple[Revision, int]:
    revision, steps, _ = fields
    return revision, steps


def _checkpointed(_tag: str, fields: Fields) -> tuple[Revision, int]:
    revision, _, checkpointed, _ = fields
    return revision, checkpointed


def _both(_tag: str, fields: Fields) -> tuple[int, int]:
    _, committed, checkpointed, _ = fields
    return committed, checkpointed


def _short(step: int, fields: Fields) -> ops.Short:
    revision, queued, needed, leased, pending, asked, awaited, first = fields
    hint = ""
    if leased == 0 and pending == 0:
        hint = "no task is pending or leased: the trainer's feeder has submitted too few"
    elif leased == 0 and not asked:
        hint = "no worker has asked for a lease"
    elif leased == 0:
        hint = f"no worker holds a lease though {pending} tasks are pending"
    if awaited:
        hint = ops.awaited_groups(awaited, text(first))
    return ops.Short(revision, step, queued, needed, leased, pending, hint, awaited, text(first))


def _batch(fields: Fields) -> ops.Batch:
    *facts, shard_tokens, replayed, queued, forks, chunks = fields
    shard = []
    for chunk in chunks:
        for record in unpack(chunk):
            group_id, _task_id, sequence, payload_key, head, tail, term, *_sizes = record
            # A fork of a later term than the record's clamps it (domain/timeline.py).
            later = [version for forked, version in forks if forked > term]
            added = [
                ops.AddedColumns(text(stage), text(key))
                for stage, key in (record[_ADDED] if len(record) > _ADDED else ())
            ]
            shard.append(
                ops.ShardGroup(
                    text(group_id),
                    text(payload_key),
                    sequence,
                    min([head, *later]),
                    min([tail, *later]),
                    added,
                    record[_USES] if len(record) > _USES else 0,
                )
            )
    revision, step, micro_batch, final, train_version, *totals, staleness_sum, staleness_max = facts
    groups, samples, tokens, loss_tokens, trajectories, reused = totals
    return ops.Batch(
        revision=revision,
        step=step,
        micro_batch=micro_batch,
        final=bool(final),
        train_version=train_version,
        total_groups=groups,
        total_samples=samples,
        total_tokens=tokens,
        total_loss_tokens=loss_tokens,
        total_trajectories=trajectories,
        reused_groups=reused,
        staleness_sum=staleness_sum,
        staleness_max=staleness_max,
        shard=shard,
        shard_tokens=shard_tokens,
        replayed=bool(replayed),
        queued=queued,
    )
