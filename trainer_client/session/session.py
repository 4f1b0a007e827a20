"""Session of a trainer: take a run over, feed its tasks, iterate over batches, publish, checkpoint.

    with client.session("math", policy=Policy(batch_groups=32), tasks=tasks, publisher=publisher) as session:
        for batch in session:
            train(batch)
            session.publish(model.save_pretrained)
            if batch.step % 50 == 49:
                save_checkpoint(model, optimizer, next_step=session.next_step)
                session.checkpoint()

Entering resumes the run: a new term, in which every older trainer is refused. A batch counts as trained when
`publish`, `commit` or `checkpoint` is called after it, or the next one is asked for; publish commits through it.

Where the policy sets micro_batch_groups, a trainer that accumulates gradients takes the micro-batches as they come. The
step's totals are known with its last micro-batch, so the gradients are scaled there; `for batch in session` gathers
them:

        for micro in session.micro_batches():
            summed_loss(micro).backward()
            if micro.final:
                scale_gradients(model, 1 / micro.info.total_loss_tokens)
                optimizer.step()
                session.publish(model.save_pretrained)

Ranks: rank 0 resumes, feeds and publishes; the others only pull. Broadcast `session.start` of rank 0 and enter with
`start=` there. Call `publish` and `checkpoint` on every rank, as usual in SPMD programs. On the others they move the
clock that says which version trains on the next batch. For a sharded model they also gather with rank 0. Only rank 0
sees that a finite iterable of tasks is used up; it has to tell the others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Self, SupportsFloat

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, Group
from trainer_client.client.engines import Quorum
from trainer_client.client.operations import ServiceClient
from trainer_client.micro_batches import MicroBatches
from trainer_client.policy import Policy
from trainer_client.publish.publication import WeightSource
from trainer_client.publish.sharded import published_by
from trainer_client.selection.selection import Selection
from trainer_client.session.hold import RunHold
from trainer_client.session.plan import SessionPlan
from trainer_client.session.publishing import Publishing, Repeater
from trainer_client.session.pulls.incoming import Incoming, pull_of
from trainer_client.session.pulls.puller import PullSource
from trainer_client.session.tracing import Updates
from trainer_client.state import Resumed, RunState


class TrainerSession(RunHold):
    """Session: one trainer's hold on a run, from the `with` of `BufferClient.session` to its end. One thread uses it.

    It belongs to the process that opened it. A forked child, which inherits it without its threads, gets UsedAfterFork
    for every use.
    """

    def __init__(self, client: ServiceClient, plan: SessionPlan, run: RunState, start: Resumed) -> None:
        super().__init__(client, plan, run, start)
        self.batch_groups = plan.batch_groups
        """Number of groups N of the steps pulled from now on, equal on every rank. With prefetch these are later steps;
        a function of the step states the N of each."""
        self._world_size, self._prefetch = plan.world_size, plan.prefetch
        self._publishing = Publishing(client, plan, run, start, self._clock, self._meter, self._on_wait)
        self._repeater = Repeater(self._look, self._publishing.can_repeat, self._publishing.repeat, start)
        options = plan.options
        self._selection = Selection(options.filter, options.sampler, options.selection_timeout_s, options.barrier)
        self._updates = Updates(run, start, plan.rank)
        self._unselected: Batch | None = None
        """Batch that was handed out, of which a filter or a sampler has not said yet what is kept."""
        self._is_whole = True
        """True when the batch in hand is a whole one."""
        self._micro_batches = MicroBatches()
        """Micro-batches of a whole batch that is not complete yet."""
        source = PullSource(
            pull=pull_of(client, plan, start, lambda: self.batch_groups),
            published=lambda: self.state().published.version,
            exhausted=lambda: self.exhausted,
            check=self.check,
            loop=self.client.pull_loop(self.run_id),
            on_wait=self._on_wait,
            while_waiting=self._repeater,
        )
        self._incoming = Incoming(client, plan, start, source, self._clock, self._meter)

    # ── batches ──────────────────────────────────────────────────────────────

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Pull this rank's shard of the next step, whole; ends when all tasks are used up or the run was drained.

        Raises BatchNotReady after `pull_timeout_s`; StaleTerm when another trainer has taken over; whatever the
        iterable of tasks raised; InvalidField in the middle of a step of which `micro_batches` gave a part.
        """
        if self._incoming.is_amid_step and not self._micro_batches:
            after = self._incoming.next
            raise InvalidField("micro_batch", after.micro_batch, f"0: micro_batches() gave a part of step {after.step}")
        if self._unselected is None:
            self._is_whole = True
            self._clock.train()
            self._meter.next()
            while (whole := self._micro_batches.whole()) is None:
                if (batch := self._take()) is None:
                    raise StopIteration
                self._micro_batches.add(batch)
            self._unselected = self._hand_out(whole)
        return self._selected(self._unselected)

    def micro_batches(self) -> Iterator[Batch]:
        """Yield this rank's shards of the micro-batches of this and every later step, each as soon as it is there.

        Where the policy does not stream, every step is one final micro-batch. Ends and raises as the iteration over
        whole batches does; a step that cannot be filled any more ends without a final micro-batch.
        """
        while True:
            if self._unselected is None:
                self._is_whole = False
                self._clock.train()
                self._meter.next()
                batch = self._micro_batches.next() if self._micro_batches else self._take()
                if batch is None:
                    return
                self._unselected = self._hand_out(batch)
            selected = self._selected(self._unselected)
            if selected.groups or selected.final or not self._selection:
                yield selected

    def reject(
        self,
        batch: Batch,
        groups: Collection[Group],
        reason: str,
        *,
        barrier: Callable[[], object] | None = None,
        others: bool = True,
    ) -> Batch:
        """Give groups of the batch in hand back, and return the batch without them, and with others.

        The service counts them as rejected, for `reason`, and the step takes as many others, exactly once. A whole
        batch is returned whole again, with the others at its end. What `micro_batches` gave is returned without the
        groups; the others come as further micro-batches, and `final` moves to the last of them. When no others can come
        any more, the batch stays smaller and is not `final`.

        `others` False: nothing takes their place, and the batch, a whole one, is returned smaller.

        With several ranks every one calls it, also with no groups. `barrier`: a function that returns when all of them
        have called it, such as torch.distributed.barrier. It is called twice: no rank looks before all have given back,
        nor gives back again before all have what came for it.

        Raises InvalidField for a group that the step does not have, without a barrier, and for `others` False where
        micro-batches come one by one; else as the iteration.
        """
        if self._world_size > 1 and barrier is None:
            raise InvalidField("barrier", "None", "a function, where several ranks give groups back")
        if not others and not self._is_whole:
            raise InvalidField(
                "others", "False", "True with micro_batches(): a step of these goes on until it is whole"
            )
        ids = [group.group_id for group in groups]
        with self._busy("pull_wait"):
            returned = self._incoming.give_back(batch, ids, reason, barrier, others=others, is_whole=self._is_whole)
            self._updates.rejected(ids)
            self._updates.got(returned)
            if barrier is not None:
                barrier()
        return returned

    def took(self, step: int) -> None:
        """Count `step` as handed to the training loop; another process pulled it (`trainer_client.dataset`).

        The steps before it are trained. Raises InvalidField in a session that prefetches itself.
        """
        self._holder.check()
        if self._prefetch:
            raise InvalidField("prefetch", self._prefetch, "0 where another process pulls")
        if self._selection:
            raise InvalidField("filter, sampler", "set", "none where another process pulls")
        self._clock.train()
        self._clock.hand_out(step)
        self._incoming.skip_to(step + 1)
        if self._feeder is not None:
            self._feeder.wake()

    # ── metrics ──────────────────────────────────────────────────────────────

    def metrics(self, *, timeout_s: float = 1.0) -> dict[str, float]:
        """Return the figures of the newest step so far, each under a name "rollout_buffer/…"; {} before the first
        batch.

        Rank 0 asks for the run as well, once per step; without an answer within `timeout_s` those figures are missing.
        """
        return self._meter.metrics(timeout_s)

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add figures of the trainer's own, under their own names, to the metrics of the step in hand."""
        self._meter.log(values)

    # ── progress ─────────────────────────────────────────────────────────────

    def publish(
        self,
        source: WeightSource = None,
        *,
        version: int | None = None,
        wait_for: Quorum | None = None,
        timeout_s: float = 600.0,
    ) -> int:
        """Offer weights trained on every batch so far to the engines, and commit through the last one.

        `source`: a manifest, None for engines that need not load, or what the session's publisher takes. A files
        publisher takes a directory, or a function that writes the weights into one. The others take a state dict, a
        module or a function that gives tensors. A sharded source is given on every rank.

        `version`: None: the next one that is free. `wait_for`: None: it does not wait for the engines; else how many of
        them have to be ready with the version within `timeout_s`. Returns the version.

        Raises VersionConflict, StaleTerm, InvalidField, the publisher's errors, PublishFailed on a rank that gathered
        where rank 0 failed, and NotReady, which names the engines that lag. After NotReady the version is published all
        the same.
        """
        with self._busy("publish"):
            version = self._publishing.next_version() if version is None else version
            with self._updates.publishing(version), published_by(source, leads=self._rank == 0) as gathered_source:
                if self._rank == 0:
                    self._publishing.publish(gathered_source, version, self._last_step())
                self._clock.published(version)
            self._published(version, wait_for, timeout_s)
        return version

    def rollback(
        self, to_version: int, *, version: int | None = None, wait_for: Quorum | None = None, timeout_s: float = 600.0
    ) -> int:
        """Publish the weights of an older version again, under a new one; commits nothing. Returns the new version.

        The trainer's own weights are the caller's business, as are the batches that are generated meanwhile. Raises
        InvalidField when there is no publisher, or the files of `to_version` are gone; else as `publish`.
        """
        with self._busy("publish"):
            version = self._publishing.next_version() if version is None else version
            with self._updates.publishing(version):
                if self._rank == 0:
                    self._publishing.rollback(to_version, version)
            self._clock.correct(version)
            self._published(version, wait_for, timeout_s)
        return version

    def update_policy(self, **changes: object) -> Policy:
        """Change fields of the run's policy while it goes on, as a curriculum does; returns the effective policy.

        Others may change other fields at the same time. Other ranks do not hear of it: for batches_per_publish, start
        them again. Raises InvalidPolicy, InvalidField.
        """
        self.policy = self.client.update_policy(self.run_id, None, **changes)
        self._publishing.retained_steps = self.policy.retained_steps
        self._clock.pace(self.policy.batches_per_publish or 1)
        return self.policy

    def commit(self) -> None:
        """Mark every batch so far as trained, without publishing."""
        self._clock.train()
        if self._rank == 0:
            with self._busy("publish"):
                self._publishing.commit(self.next_step)

    def checkpoint(self) -> None:
        """Say that the trainer's own checkpoint, with `next_step`, is safe: nothing before it is kept for replay.

        Weights that no resume needs any more are removed. Raises StaleTerm.
        """
        self.commit()
        if self._rank == 0:
            with self._busy("checkpoint"):
                self._publishing.checkpoint(self.next_step)

    def close(self) -> None:
        """End feeding and prefetching. The run goes on; a later session resumes it. In a forked child: nothing."""
        if not self._holder.is_here:
            return
        if self._feeder is not None:
            self._feeder.stop()
        self._incoming.stop()
        self._selection.close()
        self._updates.close()
        self._meter.end()

    # ── inside ───────────────────────────────────────────────────────────────

    def _selected(self, batch: Batch) -> Batch:
        """Return the batch as filter and sampler have it. When they fail it is not trained, and the next one."""
        try:
            selected = self._selection.select(batch, self.reject, is_whole=self._is_whole)
        except BaseException:
            self._clock.take_back(batch.step)
            raise
        self._unselected = None
        if selected.final or self._is_whole:
            self._clock.hand_out(batch.step)
        return selected

    def _take(self) -> Batch | None:
        with self._busy("pull_wait"):
            self.check()
            self._repeater.begin()
            with self._updates.pulling(self._clock.version + 1):
                return self._incoming.take()

    def _hand_out(self, batch: Batch) -> Batch:
        if batch.final:
            self._clock.hand_out(batch.step)
        if self._feeder is not None:
            self._feeder.wake()
        self._meter.got(batch)
        self._updates.got(batch)
        return batch

    def _last_step(self) -> int | None:
        """Return the last step in the weights, of whichever term; None before the first."""
        return self.next_step - 1 if self.next_step else None

    def _published(self, version: int, wait_for: Quorum | None, timeout_s: float) -> None:
        self._meter.version = version
        if wait_for is not None and self._rank == 0:
            self.wait_for_engines(wait_for, timeout_s=timeout_s, on_wait=self._on_wait)
