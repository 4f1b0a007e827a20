"""What trainers do: pull, commit, publish, checkpoint, resume, and report what is lost."""

from hypothesis import strategies as st

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from tests.model.choices import rarely
from tests.model.worker_actions import WorkerActions


class TrainerActions(WorkerActions):
    """Each method is one action; some are what a trainer and its workers do in a row."""

    def pull_step(self, draw: st.DataObject) -> int:
        next_step, first = self.view.next_step, self.view.checkpointed_steps
        if rarely(draw, 3):
            steps = [first, first - 1, next_step - 1, (first + next_step) // 2, next_step + 1]
            return draw.draw(st.sampled_from([step for step in steps if step >= 0]))
        return next_step

    def pull_once(self, draw: st.DataObject, step: int) -> None:
        world_size = self.view.world_size or draw.draw(st.integers(1, 3))
        if rarely(draw, 16):
            world_size += 1
        rank = draw.draw(st.integers(0, world_size - 1)) + (world_size if rarely(draw, 24) else 0)
        version = self.view.published.version
        train_version = draw.draw(
            st.sampled_from([None, version, version, version + 1, version + 3, max(0, version - 1)])
        )
        sharded_for = self.pair.world_size_of(step)
        pulled = self.pair.both("pull", ops.Pull(self.epoch(draw), step, rank, world_size, train_version))
        if isinstance(pulled, ops.Batch):
            self.pair.seen["pull:resharded"] += sharded_for not in {None, world_size}
            self.pair.seen["pull:replayed" if pulled.replayed else "pull:assembled"] += 1
            if self.blocked and not pulled.replayed:
                self.retry_blocked(draw)
        elif pulled is not None:
            self.pair.seen["pull:short"] += 1

    def pull(self, draw: st.DataObject) -> None:
        self.pull_once(draw, self.pull_step(draw))

    def fill_and_pull(self, draw: st.DataObject) -> None:
        """Enough groups for a batch, with names of their own, and a pull of the next step."""
        facts = [self.facts(draw, f"fill-{self.request_id()}", 0, "") for _ in range(self.view.policy.batch_groups)]
        self.send(draw, facts)
        self.pull_once(draw, self.view.next_step)

    def train(self, draw: st.DataObject) -> None:
        """A whole step: fill, pull, and unless it prefetches publish and commit, as a trainer does."""
        self.fill_and_pull(draw)
        view = self.view
        if not rarely(draw, 3) and view.next_step > view.committed_steps:
            version = view.published.version + 1
            self.publish_once(ops.Publish(view.epoch, version, b"manifest %d" % version, view.next_step - 1))

    def commit(self, draw: st.DataObject) -> None:
        self.pair.both("commit", self.epoch(draw), self.through(draw))

    def through(self, draw: st.DataObject) -> int:
        """A step to commit: mostly the last assembled one."""
        last = self.view.next_step - 1
        return max(0, draw.draw(st.sampled_from([last, last, last, last - 1, last + 1])))

    def publish(self, draw: st.DataObject) -> None:
        published = self.view.published.version
        version = max(0, published + draw.draw(st.sampled_from([1, 1, 1, 2, 0, 0, -1])))
        manifest = b"" if version == 0 else b"manifest %d%s" % (version, b" changed" if rarely(draw) else b"")
        through = draw.draw(st.sampled_from([True, True, False]))
        commit_through = self.through(draw) if through and self.view.next_step else None
        self.publish_once(ops.Publish(self.epoch(draw), version, manifest, commit_through))

    def publish_once(self, publish: ops.Publish) -> None:
        done = self.pair.both("publish", publish)
        if done is not None:
            self.pair.seen["publish:new" if done.published not in self.versions else "publish:repeated"] += 1
            self.versions.append(done.published)

    def checkpoint(self, draw: st.DataObject) -> None:
        last = self.view.committed_steps - 1
        through = max(0, draw.draw(st.sampled_from([last, last, last - 1, last - 2, last + 1])))
        self.pair.both("checkpoint", self.epoch(draw), through)

    def resume(self, draw: st.DataObject) -> None:
        if self.resumes and rarely(draw, 6):
            request = self.recent(draw, self.resumes)
            self.pair.seen["resume:repeated"] += request is self.resumes[-1]
        else:
            last, freed = self.view.next_step, self.view.checkpointed_steps
            between = (self.view.committed_steps + last + 1) // 2
            steps = [None, last - 1, last - 2, last - 3, between, between, freed, freed - 1, freed - 1, last + 1]
            step = draw.draw(st.sampled_from([step for step in steps if step is None or step >= 0]))
            mode = draw.draw(st.sampled_from(ops.ResumeMode))
            request = ops.Resume(step, mode, self.request_id(), not rarely(draw, 3))
        before = self.view
        resumed = self.pair.both("resume", request)
        if resumed is None:
            return
        self.resumes.append(request)
        self.versions.append(WeightVersion(resumed.epoch, resumed.version))
        if resumed.epoch > before.epoch:
            taken_back = before.next_step > resumed.next_step
            self.pair.seen[f"resume:{request.mode}"] += taken_back
            self.pair.seen["resume:regenerated"] += resumed.next_step < before.checkpointed_steps
            self.pair.seen["resume:behind"] += before.committed_steps < resumed.next_step
        if resumed.next_step < resumed.next_unassembled_step:
            self.pull_once(draw, resumed.next_step)

    def interrupt_and_rewind(self, draw: st.DataObject) -> None:
        """Something is kept of a task just before the trainer goes back behind the weights that made it."""
        self.train(draw)
        self.submit(draw)
        self.lease(draw)
        if self.grants:
            worker, instance, grant = self.grants[-1]
            newest = self.versions[-1]
            kept = ops.LeaseReturn(grant.lease_id, ops.ReturnKind.INTERRUPTED, "", b"newest", newest, 6)
            self.pair.both("give_back", worker, instance, [kept])
        self.resume(draw)

    def report_lost(self, draw: st.DataObject) -> None:
        step = draw.draw(st.integers(max(0, self.view.committed_steps - 1), self.view.next_step))
        names = self.pair.groups_of(step) or ["nothing/0"]
        lost = draw.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
        self.pair.both("report_lost", step, lost)
