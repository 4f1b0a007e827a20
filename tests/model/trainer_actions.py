"""Actions of trainers: pull, commit, publish, checkpoint, resume, and report what is lost."""

import dataclasses

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.policy import UNSET
from buffer_service.domain.steering.decisions import Decision
from buffer_service.domain.steering.knobs import Knobs
from tests.model.drawing import Draw
from tests.model.stage_actions import StageActions
from tests.model.universe import CLOCKS

MODES = tuple(ops.ResumeMode)
MICRO_BATCHES_OF_A_STEP = 8


class TrainerActions(StageActions):
    """Each method is one action; some are what a trainer and its workers do in a row."""

    # ── pull ──

    def pull(self, draw: Draw) -> None:
        """The next micro-batch, or one that was, is gone or is to come."""
        next_step, first = self.view.next_step, self.view.checkpointed_steps
        step = next_step
        if draw.rarely(3):
            steps = [first, first - 1, next_step - 1, (first + next_step) // 2, next_step + 1]
            step = draw.pick([step for step in steps if step >= 0])
        world_size = self.world_size(draw) + (1 if draw.rarely(16) else 0)
        rank = draw.integer(0, world_size - 1) + (world_size if draw.rarely(24) else 0)
        closed = self.pair.inside.micro_batches_of(step)
        number = closed
        if closed and draw.rarely(2):
            number = draw.integer(0, closed - 1)
        elif draw.rarely(6):
            number = closed + draw.integer(0, 1)
        elif step < next_step:
            number = max(0, closed - 1)
        version = self.view.published.version
        train_version = draw.pick((None, None, version, version + 1, version + 3, max(0, version - 1)))
        groups = draw.integer(0, 8) if draw.rarely(10) else None
        self.pair.both(
            "pull", ops.Pull(self.term(draw), step, rank, world_size, train_version, number, batch_groups=groups)
        )

    def next_micro_batch(self, draw: Draw, *, ahead: int = 0) -> ops.Batch | ops.Short | None:
        """All ranks pull the next micro-batch, unless it is not ready."""
        step, world_size = self.view.next_step, self.world_size(draw)
        number = self.pair.inside.micro_batches_of(step)
        train_version = (
            None if draw.rarely(2) or (number and not draw.rarely(4)) else self.view.published.version + ahead
        )
        pulled: ops.Batch | ops.Short | None = None
        groups = draw.integer(1, 4) if draw.rarely(10) else None
        first = draw.integer(0, world_size - 1)
        for rank in [*range(first, world_size), *range(first)]:
            request = ops.Pull(self.view.term, step, rank, world_size, train_version, number, batch_groups=groups)
            pulled = self.pair.both("pull", request)
            if not isinstance(pulled, ops.Batch):
                break
            if draw.rarely(3):
                break  # the other ranks come later, or never
        return pulled

    def fill(self, draw: Draw) -> None:
        """Enough groups for the next micro-batch, of tasks or with names of their own."""
        count = min(self.pair.inside.missing(self.world_size(draw)), 12)
        if count > 0 and draw.rarely(4):
            self.work(draw, count)
        elif count > 0:
            self.send(draw, [self.facts(draw, f"fill-{self.number()}", 0, "") for _ in range(count)])

    def fill_and_pull(self, draw: Draw) -> None:
        self.fill(draw)
        self.next_micro_batch(draw)
        if self.pair.waiting:
            self.retry_blocked(draw)

    def pull_under_leases(self, draw: Draw) -> None:
        """The next micro-batch, when of what was leased with the newest weights some is still in flight."""
        grants = self.lease_new(draw, draw.integer(2, 4))
        if pushed := grants[: draw.integer(1, 3)]:
            self.push_grants(draw, pushed)
        self.next_micro_batch(draw)

    def train(self, draw: Draw) -> None:
        """A whole step: fill and pull mostly until it is complete, and unless it prefetches publish and commit."""
        for _ in range(draw.pick((MICRO_BATCHES_OF_A_STEP, MICRO_BATCHES_OF_A_STEP, 2))):
            self.fill(draw)
            pulled = self.next_micro_batch(draw)
            if not isinstance(pulled, ops.Batch) or pulled.final:
                break
        view = self.view
        if not draw.rarely(3) and view.next_step > view.committed_steps:
            version = view.published.version + 1
            clock = self.clock(draw)
            self.publish_once(ops.Publish(view.term, version, b"manifest %d" % version, view.next_step - 1, clock))

    def train_on(self, draw: Draw) -> None:
        """Several steps, so that later ones may use groups again."""
        for _ in range(draw.integer(2, 4)):
            self.train(draw)
            if draw.rarely(3):
                self.commit(draw)
            if draw.rarely(6):
                self.checkpoint(draw)

    # ── progress ──

    def commit(self, draw: Draw) -> None:
        self.pair.both("commit", self.term(draw), self.through(draw))

    def through(self, draw: Draw) -> int:
        """A step to commit: mostly the last assembled one."""
        last = self.view.next_step - 1
        return max(0, draw.pick((last, last, last, last - 1, last + 1)))

    def publish(self, draw: Draw) -> None:
        published = self.view.published.version
        version = max(0, published + draw.pick((1, 1, 1, 1, 2, 0, 0, -1)))
        manifest = b"" if version == 0 else b"manifest %d%s" % (version, b" changed" if draw.rarely() else b"")
        commit_through = self.through(draw) if self.view.next_step and draw.integer(0, 2) else None
        self.publish_once(ops.Publish(self.term(draw), version, manifest, commit_through, self.clock(draw)))

    def clock(self, draw: Draw) -> ops.TrainerClock | None:
        """Return what the trainer says of its time, if anything."""
        said = draw.pick(CLOCKS)
        return None if said is None else ops.TrainerClock(*said)

    def publish_once(self, publish: ops.Publish) -> None:
        done = self.pair.both("publish", publish)
        if done is not None:
            self.pair.seen["publish:new" if done.published not in self.versions else "publish:repeated"] += 1
            self.versions.append(done.published)

    def steer(self, draw: Draw) -> None:
        """A controller decides after a publish: often twice, sometimes too late; then workers ask for work."""
        self.submit(draw)
        self.publish_some(draw.pick((0, 1, 1, 1)))
        version = self.view.published.version - draw.pick((0, 0, 0, 1))
        for _ in range(draw.integer(1, 2)):
            knobs = Knobs(
                micro_batch_groups=draw.integer(0, 3),
                max_queued_groups=draw.pick((0, 1, 2, 3, 5)),
                lookahead_milli=draw.pick((UNSET, 0, 250, 500, 999, 1_000, 1_334, 2_500)),
                max_inflight_groups=draw.pick((0, 0, 1, 3)),
            )
            kept = self.pair.both("decide", Decision(version=version, moved_at=version, knobs=knobs, reason="as drawn"))
            self.pair.seen["decide:kept" if kept else "decide:late"] += 1
        self.lease_with_the_newest(4)

    def publish_some(self, count: int) -> None:
        """The next versions, one after another."""
        for _ in range(count):
            self.publish_once(ops.Publish(self.view.term, self.view.published.version + 1, b"", None))

    def interrupt_and_lease_again(self, draw: Draw) -> None:
        """A partial rollout with an old head meets an engine with new weights."""
        self.lease(draw)
        if self.grants:
            self.keep(draw, draw.recent(self.versions))
        self.publish_some(draw.integer(0, 2))
        self.lease_with_the_newest(4)

    def outdate(self, draw: Draw) -> None:
        """The trainer leaves leases behind, whose holder then asks for them."""
        self.lease(draw)
        self.publish_some(draw.integer(1, 3))
        if self.grants:
            self.extend(draw)
            self.extend(draw)

    def fall_behind(self, draw: Draw) -> None:
        """An engine asks with the weights that a publish has replaced, and again when it has loaded others."""
        self.submit(draw)
        self.submit(draw)
        self.train(draw)
        self.publish_some(draw.integer(0, 1))
        if draw.integer(0, 1):
            self.fill(draw)
        last = len(self.versions) - 1
        for behind in (draw.pick((1, 1, 2)), draw.integer(0, 1)):
            self.lease_with(self.versions[max(0, last - behind)], draw.integer(2, 6))

    def outdate_queue(self, draw: Draw) -> None:
        """Queued groups are left behind, and a pull finds them."""
        self.work(draw, draw.integer(1, 3))
        self.next_micro_batch(draw, ahead=draw.integer(1, 3))

    def rewind_under_leases(self, draw: Draw) -> None:
        """The trainer goes back behind the weights of live leases, and on from there."""
        self.train(draw)
        self.lease(draw)
        request = ops.Resume(self.view.checkpointed_steps, draw.pick(MODES), self.request_id(), allow_regenerate=True)
        resumed = self.pair.both("resume", request)
        if resumed is not None:
            self.resumes.append(request)
            self.versions.append(WeightVersion(resumed.term, resumed.version))
        self.outdate(draw)

    def push_from_before(self, draw: Draw) -> None:
        """The trainer goes back, and groups come in that were made with weights from beyond the fork."""
        self.train(draw)
        abandoned = self.versions[-1]
        request = ops.Resume(self.view.checkpointed_steps, draw.pick(MODES), self.request_id(), allow_regenerate=True)
        resumed = self.pair.both("resume", request)
        if resumed is not None:
            self.resumes.append(request)
            self.versions.append(WeightVersion(resumed.term, resumed.version))
        late = [
            dataclasses.replace(
                self.facts(draw, f"late-{self.number()}", 0, ""),
                tail=abandoned,
                mean_milli=max(0, abandoned.version * 1_000 - draw.pick((0, 1, 700))),
            )
            for _ in range(draw.integer(1, 3))
        ]
        self.send(draw, late)
        self.next_micro_batch(draw, ahead=draw.integer(0, 3))

    def checkpoint(self, draw: Draw) -> None:
        last = self.view.committed_steps - 1
        through = max(0, draw.pick((last, last, last - 1, last - 2, last + 1)))
        self.pair.both("checkpoint", self.term(draw), through)

    def resume(self, draw: Draw) -> None:
        if self.resumes and draw.rarely(6):
            request = draw.recent(self.resumes)
            self.pair.seen["resume:repeated"] += request is self.resumes[-1]
        else:
            last, freed = self.view.next_step, self.view.checkpointed_steps
            between = (self.view.committed_steps + last + 1) // 2
            steps = [None, last, last - 1, last - 2, last - 3, between, between, freed, freed - 1, freed - 1, last + 1]
            step = draw.pick([step for step in steps if step is None or step >= 0])
            request = ops.Resume(step, draw.pick(MODES), self.request_id(), not draw.rarely(3))
        before = self.view
        resumed = self.pair.both("resume", request)
        if resumed is None:
            return
        self.resumes.append(request)
        self.versions.append(WeightVersion(resumed.term, resumed.version))
        if resumed.term > before.term:
            self.pair.seen["resume:regenerated"] += resumed.next_step < before.checkpointed_steps
            self.pair.seen["resume:behind"] += before.committed_steps < resumed.next_step
        if draw.rarely(4):
            self.next_micro_batch(draw, ahead=draw.integer(0, 3))
        if resumed.next_step < resumed.next_unassembled_step:
            self.read_again(draw, resumed.next_step)
        elif self.pair.inside.micro_batches_of(resumed.next_step):
            self.read_again(draw, resumed.next_step)
            self.fill_and_pull(draw)

    def read_again(self, draw: Draw, step: int) -> None:
        """The micro-batches of a stored step, as a restarted trainer reads them, perhaps with other ranks."""
        world_size = self.world_size(draw)
        for number in range(self.pair.inside.micro_batches_of(step)):
            rank = draw.integer(0, world_size - 1)
            self.pair.both("pull", ops.Pull(self.view.term, step, rank, world_size, None, number))

    def interrupt_and_rewind(self, draw: Draw) -> None:
        """Something is kept of a task just before the trainer goes back behind the weights that made it."""
        self.train(draw)
        self.submit(draw)
        self.lease(draw)
        if self.grants:
            self.keep(draw, self.versions[-1])
        self.resume(draw)

    def reject(self, draw: Draw) -> None:
        """Groups of a step that is not committed go back; sometimes twice, of a wrong step, or none."""
        first, last = self.view.committed_steps, self.view.next_step
        steps = [*range(first, last), *([last] if self.pair.inside.micro_batches_of(last) else [])]
        step = draw.pick(steps) if steps and not draw.rarely(8) else draw.integer(max(0, first - 1), last)
        there, gone = self.pair.inside.groups_of(step), self.pair.inside.rejected_of(step)
        names = [draw.pick(there) for _ in range(draw.integer(1, 2))] if there else []
        if gone and draw.rarely(3):
            names.append(draw.pick(gone))
        if draw.rarely(16):
            names.append("nothing/0")
        request = ops.Reject(self.term(draw), step, [] if draw.rarely(12) else names, "as drawn")
        self.pair.both("reject", request)
        if draw.rarely(4):
            self.pair.both("reject", request)

    def replace(self, draw: Draw) -> None:
        """A step that lacks groups gets others, or waits for them."""
        lacking = self.pair.inside.lacking()
        if not lacking:
            self.reject(draw)
            lacking = self.pair.inside.lacking()
        if not lacking:
            return
        step, missing = draw.pick(lacking)
        if not draw.rarely(4):
            count = missing - len(self.pair.inside.queued())
            self.send(draw, [self.facts(draw, f"fill-{self.number()}", 0, "") for _ in range(count)])
        world_size, number = self.world_size(draw), self.pair.inside.micro_batches_of(step)
        for rank in range(world_size):
            train_version = self.view.published.version if draw.rarely(12) else None
            pulled = self.pair.both("pull", ops.Pull(self.view.term, step, rank, world_size, train_version, number))
            if not isinstance(pulled, ops.Batch) or draw.rarely(3):
                break
        if draw.rarely(4):
            self.read_again(draw, step)

    def lose_again(self, draw: Draw) -> None:
        """Report the payload of a group that a step uses again as gone."""
        self.fill(draw)
        self.next_micro_batch(draw)
        steps = range(self.view.committed_steps, self.view.next_step + 1)
        again = [(step, name) for step in steps for name in self.pair.inside.reused_of(step)]
        for step, name in [draw.pick(again)] if again else []:
            self.pair.both("report_lost", self.view.term, step, [[name, 0]])
            if draw.rarely(2):
                self.read_again(draw, step)

    def report_lost(self, draw: Draw) -> None:
        step = draw.integer(max(0, self.view.committed_steps - 1), self.view.next_step)
        if draw.rarely(2):
            step = self.view.next_step
        # Most often groups of the step that were read, by the keys under which they were read last.
        read = [name for name in self.pair.inside.groups_of(step) if name in self.pair.read]
        names = [draw.pick(read or ["nothing/0"]) for _ in range(draw.integer(1, 2))]
        term = self.term(draw)
        self.pair.both("report_lost", term, step, [[name, 1 if draw.rarely(4) else 0] for name in names])
