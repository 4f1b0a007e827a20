"""A Hypothesis state machine over every operation of a run, on the model and a subject side by side.

Rules prefer what means something in the present state (live leases, the next step, the present epoch) and now and then
take what does not. `seen` counts operations and outcomes over all histories.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.policy import RunPolicy
from tests.model.pair import Blocked, Pair
from tests.model.subjects import Subject
from tests.model.uncover import uncover
from tests.model.universe import (
    BODY_KINDS,
    ENGINES,
    INSTANCES,
    OWN_TASKS,
    TASKS,
    TIME_STEPS_MS,
    WORKERS,
    group_sizes,
    policies,
)

T = TypeVar("T")

_run_numbers = itertools.count(1)


STEADY = {
    "submit": 5,
    "lease": 7,
    "push_results": 9,
    "push_without_lease": 1,
    "push_again": 2,
    "push_forged": 1,
    "retry_blocked": 4,
    "extend": 2,
    "give_back": 4,
    "report_engine": 1,
    "pull": 5,
    "fill_and_pull": 2,
    "train": 1,
    "commit": 1,
    "publish": 5,
    "checkpoint": 2,
    "time_passes": 4,
    "sweep": 1,
}
TROUBLE = {
    "resume": 3,
    "report_lost": 4,
    "update_policy": 2,
    "change_budget": 1,
    "create_again": 1,
    "come_from_the_future": 1,
}
MOODS = {
    "steady": STEADY,
    "resumed": {
        **STEADY,
        "resume": 3,
        "fill_and_pull": 6,
        "train": 8,
        "checkpoint": 4,
        "report_lost": 4,
        "time_passes": 1,
    },
    "interrupted": {
        **STEADY,
        "lease": 12,
        "give_back": 14,
        "train": 6,
        "push_results": 2,
        "push_again": 1,
        "interrupt_and_rewind": 5,
    },
    "short of everything": {**STEADY, "time_passes": 12, "give_back": 8, "change_budget": 4},
    "troubled": {**STEADY, **TROUBLE},
}
"""How often each action is taken, by the mood of a history. (Rules of their own would not do: Hypothesis leaves a
random part of them out of each history, and most histories then get nowhere.)"""


def rarely(draw: st.DataObject, one_in: int = 8) -> bool:
    """True once in so many times; simplest is False."""
    return draw.draw(st.integers(0, one_in - 1)) == one_in - 1


class RunMachine(RuleBasedStateMachine):
    """One run. Subclasses set the class variables."""

    subject: ClassVar[Subject]
    mood: ClassVar[str]
    seen: ClassVar[Counter[str]]

    @initialize(policy=policies())
    def create(self, policy: RunPolicy) -> None:
        self.pair = Pair(self.subject, f"run-{next(_run_numbers)}", policy, self.seen)
        self.requests = 0
        self.grants: list[tuple[str, str, ops.LeaseGrant]] = []
        """Every lease ever given: worker, instance, grant."""
        self.instances = dict.fromkeys(WORKERS, INSTANCES[0])
        self.asks: list[ops.LeaseAsk] = []
        self.pushes: list[ops.GroupFacts] = []
        self.blocked: list[Blocked] = []
        self.submits: list[ops.Submit] = []
        self.resumes: list[ops.Resume] = []
        self.versions = [WeightVersion(1, 0)]
        """Every pair that was ever published, in order."""
        self.weights = MOODS[self.mood]

    @rule(draw=st.data())
    def act(self, draw: st.DataObject) -> None:
        possible = [name for name, weight in self.weights.items() for _ in range(weight) if self.can(name)]
        getattr(self, draw.draw(st.sampled_from(possible), label="act"))(draw)

    def can(self, name: str) -> bool:
        """Whether there is anything to do it with."""
        needed: dict[str, bool] = {
            "push_results": bool(self.grants),
            "push_again": bool(self.pushes),
            "retry_blocked": bool(self.blocked),
            "extend": bool(self.grants),
            "give_back": bool(self.grants),
            "commit": self.view.next_step > 0,
            "checkpoint": self.view.next_step > 0,
            "report_lost": self.view.next_step > self.view.committed_steps,
        }
        return needed.get(name, True)

    def teardown(self) -> None:
        if hasattr(self, "pair") and not self.pair.disagreed:
            if self.blocked:
                self.pair.abandon(self.blocked)
            uncover(self.pair)
            self.pair.sweep()

    # ── choices ──

    @property
    def view(self) -> ops.RunView:
        return self.pair.view

    def request_id(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def recent(self, draw: st.DataObject, things: Sequence[T]) -> T:
        """One of the last few, the newest first."""
        return draw.draw(st.sampled_from(list(reversed(things[-6:]))))

    def epoch(self, draw: st.DataObject) -> int:
        """The present epoch, rarely another."""
        return self.view.epoch + (draw.draw(st.sampled_from([-1, 1])) if rarely(draw, 24) else 0)

    def span(self, draw: st.DataObject) -> tuple[WeightVersion, WeightVersion]:
        """Head and tail among versions that were published, most often the newest; rarely one to come."""
        back = draw.draw(st.sampled_from([0, 0, 1, 2, 4]))
        first = max(0, len(self.versions) - 1 - back)
        last = draw.draw(st.integers(first, len(self.versions) - 1))
        if rarely(draw, 16):
            return self.versions[first], WeightVersion(self.view.epoch, self.view.published.version + 1)
        return self.versions[first], self.versions[last]

    def facts(self, draw: st.DataObject, task_id: str, generation: int, lease_id: str) -> ops.GroupFacts:
        head, tail = self.span(draw)
        return ops.GroupFacts(
            task_id=task_id,
            generation=generation,
            lease_id=lease_id,
            head=head,
            tail=tail,
            **draw.draw(group_sizes()),
        )

    def send(self, draw: st.DataObject, facts: Sequence[ops.GroupFacts]) -> None:
        kinds = draw.draw(st.sampled_from(BODY_KINDS))
        groups = [ops.NewGroup(fact, f"{fact.lease_id or fact.task_id}".encode() + kinds) for fact in facts]
        blocked = self.pair.push(groups)
        self.blocked.extend(blocked)
        self.pushes.extend(facts)
        self.count_outcomes("push")

    def count_outcomes(self, operation: str) -> None:
        reply = self.pair.last
        if isinstance(reply, ops.PushResult):
            self.seen.update(f"{operation}:{outcome.kind}" for outcome in reply.outcomes)

    # ── feeder ──

    def submit(self, draw: st.DataObject) -> None:
        if self.submits and rarely(draw):
            request = self.recent(draw, self.submits)
            self.seen["submit:repeated"] += request is self.submits[-1]
        else:
            names = draw.draw(st.lists(st.sampled_from(("", "", *TASKS)), min_size=1, max_size=3))
            tasks = [
                ops.NewTask(name, 2, draw.draw(st.sampled_from([0, 0, 2])), "math", b"spec " + bytes([i]))
                for i, name in enumerate(names)
            ]
            cursor = self.view.cursor - (1 if rarely(draw, 24) else 0)
            request = ops.Submit(
                self.epoch(draw), self.request_id(), cursor, cursor + len(tasks), b"state %d" % cursor, tasks
            )
            self.submits.append(request)
        self.pair.both("submit", request)

    # ── workers ──

    def lease(self, draw: st.DataObject) -> None:
        if self.asks and rarely(draw):
            ask = self.recent(draw, self.asks)
        else:
            worker = draw.draw(st.sampled_from(WORKERS))
            if rarely(draw):
                self.instances[worker] = draw.draw(st.sampled_from(INSTANCES))
            loaded = self.recent(draw, self.versions)
            size = draw.draw(st.integers(1, 4))
            engine = draw.draw(st.sampled_from(ENGINES))
            ask = ops.LeaseAsk(worker, self.instances[worker], self.request_id(), engine, loaded, size)
        repeated = ask in self.asks
        self.asks.append(ask)
        leased = self.pair.both("lease", ask)
        if leased is not None:
            self.grants.extend((ask.worker_id, ask.instance_id, grant) for grant in leased.grants)
            self.seen[f"lease:{leased.wait or 'granted'}"] += 1
            self.seen["lease:repeated"] += repeated and bool(leased.grants)
            self.seen["lease:continued"] += any(grant.continuation for grant in leased.grants)

    def push_results(self, draw: st.DataObject) -> None:
        late = rarely(draw, 3)
        leases = self.pair.leases()
        live = [grant for _, _, grant in self.grants if grant.lease_id in leases]
        count = draw.draw(st.integers(1, 3))
        grants = [self.recent(draw, self.grants)[2] for _ in range(count)] if late or not live else live[:count]
        self.send(draw, [self.facts(draw, g.task_id, g.generation, g.lease_id) for g in grants])

    def push_without_lease(self, draw: st.DataObject) -> None:
        names = draw.draw(st.lists(st.sampled_from((*OWN_TASKS, *OWN_TASKS, *TASKS)), min_size=1, max_size=3))
        generation = 1 if rarely(draw, 16) else 0
        self.send(draw, [self.facts(draw, name, generation, "") for name in names])

    def push_again(self, draw: st.DataObject) -> None:
        self.send(draw, [self.recent(draw, self.pushes)])

    def push_forged(self, draw: st.DataObject) -> None:
        task_id = draw.draw(st.sampled_from(TASKS))
        generation, attempt = draw.draw(st.integers(0, 2)), draw.draw(st.integers(1, 4))
        lease_id = draw.draw(
            st.sampled_from(
                [
                    f"{task_id}/{generation}/{attempt}",
                    f"{task_id}/0/0",
                    f"z/{generation}/1",
                    "malformed",
                    f"{task_id}/01/1",
                ]
            )
        )
        self.send(draw, [self.facts(draw, task_id, generation, lease_id)])

    def retry_blocked(self, draw: st.DataObject) -> None:
        waiting, self.blocked = self.blocked, []
        if rarely(draw):
            self.pair.abandon(waiting)
            return
        self.blocked = self.pair.retry(waiting)
        self.count_outcomes("retry_push")

    def extend(self, draw: st.DataObject) -> None:
        worker, instance, _ = self.holder(draw)
        lease_ids = [*self.pair.leases(), *(grant.lease_id for _, _, grant in self.grants[-2:])]
        extended = self.pair.both("extend", worker, instance, lease_ids)
        if extended is not None:
            self.seen.update("extend:live" if live else "extend:lost" for live in extended.live)

    def holder(self, draw: st.DataObject) -> tuple[str, str, ops.LeaseGrant]:
        """Who was given a lease, mostly one that is live."""
        leases = self.pair.leases()
        live = [held for held in self.grants if held[2].lease_id in leases]
        return self.recent(draw, self.grants if rarely(draw, 4) or not live else live)

    def give_back(self, draw: st.DataObject) -> None:
        worker, instance, _ = self.holder(draw)
        returns = []
        for _ in range(draw.draw(st.integers(1, 2))):
            lease_id = self.holder(draw)[2].lease_id
            kind = draw.draw(st.sampled_from(ops.ReturnKind))
            error = f"error of {lease_id}" if kind is ops.ReturnKind.FAILED else ""
            body = b"" if rarely(draw, 3) else b"kept by " + lease_id.encode()
            head = self.span(draw)[0] if body else None
            returns.append(ops.LeaseReturn(lease_id, kind, error, body, head, len(body)))
        returned = self.pair.both("give_back", worker, instance, returns)
        if returned is not None:
            self.seen.update(f"give_back:{outcome}" for outcome in returned.outcomes)

    def report_engine(self, draw: st.DataObject) -> None:
        engine = draw.draw(st.sampled_from(ENGINES))
        state = draw.draw(st.sampled_from(["ready", "ready", "ready", "quarantined"]))
        errors, loaded = draw.draw(st.integers(0, 2)), self.versions[-1]
        report = ops.EngineReport(engine, "w1", state, loaded, len(self.versions), 12, "why" * errors, errors)
        self.pair.both("report_engine", report)

    # ── trainer ──

    def pull_step(self, draw: st.DataObject) -> int:
        next_step, first = self.view.next_step, self.view.checkpointed_steps
        if rarely(draw, 3):
            return draw.draw(st.integers(max(0, first - 1), next_step + 1))
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
            self.seen["pull:resharded"] += sharded_for not in {None, world_size}
            self.seen["pull:replayed" if pulled.replayed else "pull:assembled"] += 1
            if self.blocked and not pulled.replayed:
                self.retry_blocked(draw)
        elif pulled is not None:
            self.seen["pull:short"] += 1

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
        if not rarely(draw, 4) and view.next_step > view.committed_steps:
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
            self.seen["publish:new" if done.published not in self.versions else "publish:repeated"] += 1
            self.versions.append(done.published)

    def checkpoint(self, draw: st.DataObject) -> None:
        last = self.view.committed_steps - 1
        through = max(0, draw.draw(st.sampled_from([last, last, last - 1, last - 2, last + 1])))
        self.pair.both("checkpoint", self.epoch(draw), through)

    def resume(self, draw: st.DataObject) -> None:
        if self.resumes and rarely(draw, 6):
            request = self.recent(draw, self.resumes)
            self.seen["resume:repeated"] += request is self.resumes[-1]
        else:
            last, freed = self.view.next_step, self.view.checkpointed_steps
            between = (self.view.committed_steps + last + 1) // 2
            steps = [None, last - 1, last - 2, last - 3, between, freed, freed - 1, last + 1]
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
            self.seen[f"resume:{request.mode}"] += taken_back
            self.seen["resume:regenerated"] += resumed.next_step < before.checkpointed_steps
            self.seen["resume:behind"] += before.committed_steps < resumed.next_step
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

    # ── operators and time ──

    def update_policy(self, draw: st.DataObject) -> None:
        self.pair.both("update_policy", draw.draw(policies()))

    def change_budget(self, draw: st.DataObject) -> None:
        budget = draw.draw(st.sampled_from([-1, 0, 100]))
        self.pair.both("update_policy", dataclasses.replace(self.view.policy, failure_budget=budget))

    def create_again(self, draw: st.DataObject) -> None:
        self.pair.create(self.view.policy if rarely(draw, 2) else draw.draw(policies()))

    def time_passes(self, draw: st.DataObject) -> None:
        """To a moment at which something is due or no longer, most often, and what meets it there."""
        moments = [moment - self.pair.now for moment in self.pair.moments()]
        ahead = sorted({by_ms for by_ms in moments if by_ms >= 0})[:6]
        self.pair.advance(draw.draw(st.sampled_from([*ahead, *ahead, *ahead, *TIME_STEPS_MS])))
        then = draw.draw(st.sampled_from(["extend", "lease", "give_back", "retry_blocked"]))
        if self.can(then):
            getattr(self, then)(draw)

    def sweep(self, draw: st.DataObject) -> None:
        del draw
        self.pair.sweep()

    def come_from_the_future(self, draw: st.DataObject) -> None:
        """A caller has seen a revision that the store has lost."""
        seen_revision = self.view.revision + draw.draw(st.integers(1, 3))
        self.pair.both("extend", WORKERS[0], INSTANCES[0], [], seen_revision=seen_revision)
