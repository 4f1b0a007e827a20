"""Operations on batches and weights: pull, commit, publish, checkpoint, resume."""

from collections.abc import Sequence
from typing import cast

from buffer_service.domain import ops
from buffer_service.store.base import StoreBase
from buffer_service.store.replies import Fields, pack, text, unpack
from buffer_wire.errors import InvalidField
from buffer_wire.revision import NO_REVISION, Revision

UNSET = -1


class BatchOps(StoreBase):
    """Pull, commit, publish, checkpoint, resume."""

    portion = ops.PORTION
    """Groups that one call of a pull takes out of the queue at most."""

    async def pull(
        self, run_id: str, pull: ops.Pull, *, seen_revision: Revision = NO_REVISION
    ) -> ops.Batch | ops.Short:
        """See domain.ports.RunStore.pull."""
        if not 0 <= pull.rank < pull.world_size:
            raise InvalidField("rank", pull.rank, f"below world_size {pull.world_size}")
        train_version = UNSET if pull.train_version is None else pull.train_version
        batch_groups = UNSET if pull.batch_groups is None else pull.batch_groups
        who = (pull.epoch, pull.step, pull.rank, pull.world_size)
        tag, again, fields = "more", 0, Fields()
        while tag == "more":
            arguments = pack(seen_revision, *who, train_version, pull.round, batch_groups, self.portion, again)
            tag, fields = await self._call("pull", run_id, arguments)
            again = 1
        return _short(pull.step, fields) if tag == "short" else _batch(fields)

    async def report_lost(self, run_id: str, epoch: int, step: int, payload_keys: Sequence[str]) -> None:
        """See domain.ports.RunStore.report_lost."""
        await self._call("report_lost", run_id, pack(epoch, step, list(payload_keys)))

    async def commit(
        self, run_id: str, epoch: int, through_step: int, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, int]:
        """See domain.ports.RunStore.commit."""
        _, (revision, committed, more) = await self._call("commit", run_id, pack(seen_revision, epoch, through_step))
        await self._free(run_id, more)
        return revision, committed

    async def publish(
        self, run_id: str, publish: ops.Publish, *, seen_revision: Revision = NO_REVISION
    ) -> ops.Published:
        """See domain.ports.RunStore.publish."""
        through = UNSET if publish.commit_through is None else publish.commit_through
        clock = publish.clock or ops.TrainerClock(busy_ms=UNSET, wait_ms=UNSET)
        what = (publish.epoch, publish.version, publish.manifest, through)
        _, fields = await self._call("publish", run_id, pack(seen_revision, *what, clock.busy_ms, clock.wait_ms))
        revision, epoch, version, committed, more = fields
        await self._free(run_id, more)
        return ops.Published(revision, ops.WeightVersion(epoch, version), committed)

    async def plan_collective(
        self, run_id: str, plan: ops.PlanCollective, *, seen_revision: Revision = NO_REVISION
    ) -> Revision:
        """See domain.ports.RunStore.plan_collective."""
        _, (revision,) = await self._call("plan", run_id, pack(seen_revision, plan.epoch, plan.version, plan.plan))
        return cast("Revision", revision)

    async def checkpoint(
        self, run_id: str, epoch: int, through_step: int, *, seen_revision: Revision = NO_REVISION
    ) -> tuple[Revision, int]:
        """See domain.ports.RunStore.checkpoint."""
        _, (revision, steps, more) = await self._call("checkpoint", run_id, pack(seen_revision, epoch, through_step))
        await self._free(run_id, more)
        # Not left to the sweep: memory that is freed now is used again by the next payloads.
        await self.delete_trash(run_id)
        return revision, steps

    async def resume(self, run_id: str, resume: ops.Resume) -> ops.Resumed:
        """See domain.ports.RunStore.resume."""
        step = UNSET if resume.next_step is None else resume.next_step
        arguments = pack(step, resume.mode.value, resume.request_id, int(resume.allow_regenerate))
        tag, fields = "more", Fields()
        while tag == "more":
            tag, fields = await self._call("resume", run_id, arguments)
        return ops.Resumed(*fields)

    async def weights(self, run_id: str) -> ops.WeightsView:
        """See domain.ports.RunStore.weights."""
        _, (revision, epoch, version, manifest, paused, plan, may_load) = await self._call("weights", run_id, pack())
        published = ops.WeightVersion(epoch, version)
        return ops.WeightsView(revision, published, manifest, bool(paused), plan, bool(may_load))


def _short(step: int, fields: Fields) -> ops.Short:
    revision, queued, needed, leased, pending, asked = fields
    hint = ""
    if leased == 0 and pending == 0:
        hint = "no task is pending or leased: the trainer's feeder has submitted too few"
    elif leased == 0 and not asked:
        hint = "no worker has asked for a lease"
    elif leased == 0:
        hint = f"no worker holds a lease though {pending} tasks are pending"
    return ops.Short(revision, step, queued, needed, leased, pending, hint)


def _batch(fields: Fields) -> ops.Batch:
    *facts, shard_tokens, replayed, queued, forks, chunks = fields
    shard = []
    for chunk in chunks:
        for group_id, _task_id, sequence, payload_key, head, tail, epoch, *_sizes in unpack(chunk):
            # A fork of a later epoch than the record's clamps it (domain/timeline.py).
            later = [version for forked, version in forks if forked > epoch]
            shard.append(
                ops.ShardGroup(text(group_id), text(payload_key), sequence, min([head, *later]), min([tail, *later]))
            )
    revision, step, round_, final, train_version, *totals, staleness_sum, staleness_max = facts
    groups, samples, tokens, loss_tokens = totals
    return ops.Batch(
        revision=revision,
        step=step,
        round=round_,
        final=bool(final),
        train_version=train_version,
        total_groups=groups,
        total_samples=samples,
        total_tokens=tokens,
        total_loss_tokens=loss_tokens,
        staleness_sum=staleness_sum,
        staleness_max=staleness_max,
        shard=shard,
        shard_tokens=shard_tokens,
        replayed=bool(replayed),
        queued=queued,
    )
