"""The store's scripts and the reference model agree on evaluations, over random histories of them.

Training goes on beside them: versions are published, and the run is paused, drained, resumed and deleted. Every reply,
every refusal, the run's view and the list of evaluations are compared after each operation.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from buffer_service.domain import evaluations as ev
from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.keys import NONCE_BYTES
from tests.model.budget import TIMES
from tests.model.comparison import canonical, differences
from tests.model.notation import PLAIN
from tests.model.subjects import StoreSubject
from tests.oracle import ReferenceModel
from tests.oracle.evaluation_book import Book
from tests.oracle.rules.proofs import prove

OPERATIONS = int(6_000 * TIMES)
HISTORY = 150
SECRET = "of every run"
WORKERS = ("w1", "w2")
SEEN_BY = frozenset({"submit_evaluation", "delete_evaluation", "lease", "extend", "give_back", "push", "publish"})


class History:
    """One run on both sides."""

    def __init__(self, subject: StoreSubject, run_id: str, seed: int, seen: Counter[str]) -> None:
        self.subject = subject
        self.run_id = run_id
        self.random = random.Random(seed)
        self.seen = seen
        self.now = 1_700_000_000_000
        self.model = ReferenceModel(lambda: self.now)
        self.instances = dict.fromkeys(WORKERS, 1)
        self.leases: list[str] = []
        self.requests: list[ops.LeaseAsk] = []
        self.said: list[str] = []
        subject.set_time(run_id, self.now)

    def both(self, operation: str, *args: Any, ahead: int = 0) -> Any:
        """The operation on both sides; the model's reply, or None after a refusal."""
        kwargs: dict[str, Any] = {}
        if operation in SEEN_BY:
            kwargs["seen_revision"] = prove(SECRET, ahead)
        if operation == "create_run":
            kwargs["secret"] = SECRET
        self.said.append(f"{operation}{args}")
        mine: Any
        try:
            mine = getattr(self.model, operation)(self.run_id, *args, **kwargs)
        except RolloutBufferError as refusal:
            mine = refusal
        theirs, view = self.subject.call(operation, self.run_id, args, kwargs, self.random.randrange(2))
        self.compare(operation, mine, theirs)
        self.look(view)
        self.seen[f"{operation}:{mine.reason if isinstance(mine, RolloutBufferError) else 'ok'}"] += 1
        return None if isinstance(mine, RolloutBufferError) else mine

    def compare(self, what: str, mine: Any, theirs: Any) -> None:
        one, two = canonical(mine), canonical(theirs)
        assert one == two, f"{what}: {differences(one, two)} after\n" + "\n".join(self.said[-40:])

    def look(self, their_view: Any) -> None:
        try:
            self.compare("view", self.model.view(self.run_id), their_view)
            listed: Any = self.model.evaluations(self.run_id)
        except RolloutBufferError as refusal:
            listed = refusal
        self.compare("list", listed, self.subject.call("evaluations", self.run_id, (), {}, 0)[0])
        if isinstance(listed, RolloutBufferError):
            return
        for view in listed[1]:
            assert view.tasks == view.pending + view.leased + view.finished + view.failed

    # ── actions ──

    def submit(self) -> None:
        name = self.random.choice(("a", "b", "c", "d"))
        count = self.random.choice((1, 2, 3, 7))
        tasks = [ev.EvaluationTask(f"{name}.{i}", 1 + i % 2, f"spec {name} {i}".encode()) for i in range(count)]
        version = self.random.choice((None, None, 0, 1, 3, 9))
        term = self.term if self.random.random() < 0.95 else self.term + 1
        digest = f"{version} {count}".encode()
        self.both("submit_evaluation", ev.SubmitEvaluation(term, name, version, digest, tasks))

    def lease(self) -> None:
        worker = self.random.choice(WORKERS)
        if self.random.random() < 0.05:
            self.instances[worker] += 1
        view = self.model.view(self.run_id)
        versions = [view.published, ops.WeightVersion(1, 0), ops.WeightVersion(view.term, 1)]
        ask = ops.LeaseAsk(
            worker,
            str(self.instances[worker]),
            f"r{len(self.requests)}",
            self.random.choice(("e", "e", "e", "bad")),
            self.random.choice([view.published, *versions]),
            self.random.choice((0, 1, 2, 5)),
            sink=ops.TaskSink.EVALUATIONS,
            would_load=self.random.random() < 0.5,
        )
        if self.requests and self.random.random() < 0.15:
            ask = self.random.choice(self.requests[-3:])
        self.requests.append(ask)
        leased = self.both("lease", ask)
        if leased is not None:
            self.leases += [grant.lease_id for grant in leased.grants]
            self.seen[f"lease:{leased.wait}:{bool(leased.grants)}:{leased.wanted is not None}"] += 1

    def extend(self) -> None:
        worker = self.random.choice(WORKERS)
        ids = [self.some_lease() for _ in range(self.random.randrange(1, 4))]
        extended = self.both("extend", worker, str(self.instances[worker]), ids)
        self.seen.update(f"extend:{state}" for state in (extended.states if extended else ()))

    def finish(self) -> None:
        worker, lease_id = self.random.choice(WORKERS), self.some_lease()
        live = [(one.worker_id, found.lease_id(task)) for found, task, one in self.book.leased()]
        if live and self.random.random() < 0.7:
            worker, lease_id = self.random.choice(live)
        if self.random.random() < 0.4:
            group = self.group_of(lease_id)
            if written := self.random.random() < 0.4:
                group = self.write(group)
            for _ in range(1 + (written and self.random.random() < 0.3)):
                pushed = self.both("push", [group])
                self.seen.update(f"push:{outcome.kind}" for outcome in (pushed.outcomes if pushed else ()))
            return
        kind = self.random.choice((*ops.ReturnKind, ops.ReturnKind.FAILED))
        self.hand_back(worker, lease_id, kind, "broken" if kind is ops.ReturnKind.FAILED else "")

    def write(self, group: ops.NewGroup) -> ops.NewGroup:
        """The group as its pusher pushes it, who has written it, or says so."""
        nonce = self.random.randbytes(NONCE_BYTES)
        written = replace(group, facts=replace(group.facts, stored=True), nonce=nonce)
        if self.random.random() < 0.9:
            self.both("write", written)
        return replace(written, body=b"")

    def hand_back(self, worker: str, lease_id: str, kind: ops.ReturnKind, error: str) -> None:
        kept = (b"kept", ops.WeightVersion(1, 0), 7) if self.random.random() < 0.2 else (b"", None, 0)
        given = [ops.LeaseReturn(lease_id, kind, error, *kept)]
        returned = self.both("give_back", worker, str(self.instances[worker]), given)
        self.seen.update(f"return:{kind}:{outcome}" for outcome in (returned.outcomes if returned else ()))

    def wear_out(self) -> None:
        """Tasks of one version fail again and again."""
        views = self.model.evaluations(self.run_id)[1]
        if not views:
            return
        version = self.random.choice(views).version
        for attempt in range(ev.MAX_ATTEMPTS):
            instance, request = str(self.instances["w2"]), f"wear{len(self.said)}.{attempt}"
            leased = self.both("lease", replace(ASK, worker_id="w2", instance_id=instance, request_id=request,
                                                loaded=version, max_tasks=3))  # fmt: skip
            for grant in leased.grants if leased else ():
                self.hand_back("w2", grant.lease_id, ops.ReturnKind.FAILED, "worn out")
            self.now += 16_000
            self.subject.set_time(self.run_id, self.now)

    def group_of(self, lease_id: str) -> ops.NewGroup:
        """A group for the lease, at times a wrong one."""
        task = lease_id.partition("/")[0]
        name, _, place = task.partition("@")
        index = place.partition(".")[2]
        version = ops.WeightVersion(1, 0)
        if name in self.names():
            version = self.model.evaluation(self.run_id, name)[1].version
        wrong = self.random.random()
        position = int(index) if index.isdecimal() else 0
        body = f"body of {lease_id}".encode()
        facts = {
            "task_id": f"{name}.{index}" if wrong > 0.05 else "another",
            "incarnation": int(0.1 < wrong < 0.13),
            "lease_id": lease_id,
            "samples": 1 + position % 2 + (wrong > 0.95),
            "size_bytes": len(body),
            "head": version,
            "tail": version if not 0.05 < wrong < 0.1 else ops.WeightVersion(version.term, version.version + 1),
        }
        return ops.NewGroup(ops.GroupFacts(**(PLAIN["GroupFacts"] | facts)), body)

    def some_lease(self) -> str:
        if not self.leases or self.random.random() < 0.03:
            return self.random.choice(
                (
                    *("a@/0/1", "a@1.0/0/9", "a@1.0/0/0", "a@.0/0/1", "a@1.99999/0/1", "a@1.6/0/1"),
                    *("a@01.0/0/1", "a@1.00/0/1", "@1.0/0/1"),
                )
            )
        return self.random.choice(self.leases[-12:])

    def read(self) -> None:
        if not self.names():
            return
        name = self.random.choice(self.names())
        start, limit = self.random.randrange(3), self.random.choice((1, 2, 100))
        self.compare("one", self.model.evaluation(self.run_id, name), self.theirs("evaluation", name))
        mine = self.model.evaluation_results(self.run_id, name, start, limit)
        theirs = self.theirs("evaluation_results", name, start, limit)
        self.compare("results", mine, theirs)
        keys = [[one.payload_key for one in side.results if one.payload_key] for side in (mine, theirs)]
        bodies = self.model.fetch(self.run_id, keys[0]), self.theirs("fetch", keys[1])
        self.compare("bodies", list(bodies[0]), list(bodies[1]))

    def delete(self) -> None:
        self.both("delete_evaluation", self.random.choice(("a", "b", "c", "d")))

    def publish(self) -> None:
        version = self.model.view(self.run_id).published.version + self.random.choice((1, 1, 2))
        manifest = self.random.choice((b"", f"manifest {version}".encode()))
        self.both("publish", ops.Publish(self.term, version, manifest, None))

    def resume(self) -> None:
        self.both("resume", ops.Resume(None, ops.ResumeMode.REPLAY, f"resume{len(self.said)}", allow_regenerate=False))

    def quarantine(self) -> None:
        state = self.random.choice(("quarantined", "ready"))
        self.both("report_engine", ops.EngineReport("bad", "w", state, ops.WeightVersion(1, 0), 0, 0, "", 0))

    def control(self) -> None:
        self.both(self.random.choice(("pause_run", "drain_run", *("continue_run",) * 4)))

    def pass_time(self) -> None:
        self.now += self.random.choice((0, 1, 500, 1_000, 1_000, 5_000, 5_000, 60_000, 60_001))
        self.subject.set_time(self.run_id, self.now)
        self.said.append(f"time {self.now}")

    def sweep(self) -> None:
        self.said.append("sweep")
        self.model.expire(self.run_id)
        self.subject.sweep(self.run_id)
        assert self.subject.stored_bodies(self.run_id) == self.model.stored_bodies(self.run_id)
        self.look(self.subject.view(self.run_id))

    def roll_back(self) -> None:
        self.both("lease", self.requests[-1] if self.requests else ASK, ahead=1 << 50)
        self.resume()

    # ── helpers ──

    @property
    def book(self) -> Book:
        return self.model._known(self.run_id).evaluations

    @property
    def term(self) -> int:
        return self.model.view(self.run_id).term

    def names(self) -> list[str]:
        return [view.eval_id for view in self.model.evaluations(self.run_id)[1]]

    def theirs(self, operation: str, *args: Any) -> Any:
        return self.subject.call(operation, self.run_id, args, {}, 0)[0]

    def run(self) -> None:
        self.both("create_run", RunPolicy(batch_groups=2, lease_ttl_ms=60_000, retry_backoff_ms=1_000))
        ways = [
            (self.submit, 6), (self.lease, 24), (self.extend, 6), (self.finish, 30), (self.read, 6), (self.delete, 2),
            (self.publish, 2), (self.resume, 1), (self.quarantine, 1), (self.control, 2), (self.pass_time, 12),
            (self.sweep, 4), (self.roll_back, 1), (self.wear_out, 2),
        ]  # fmt: skip
        for _ in range(HISTORY):
            self.random.choices([way for way, _ in ways], [weight for _, weight in ways])[0]()
        self.both("delete_run")
        self.subject.sweep(self.run_id)
        assert self.subject.leftovers(self.run_id) == []


ASK = ops.LeaseAsk("w1", "1", "r", "e", ops.WeightVersion(1, 0), 1, sink=ops.TaskSink.EVALUATIONS)

OUTCOMES = (
    *(f"push:{outcome}" for outcome in ("recorded", "duplicate", "closed", "invalid", "unknown_lease")),
    "push:payload_missing",
    *(f"return:failed:{outcome}" for outcome in ("pending", "failed", "lost")),
    *(f"return:interrupted:{outcome}" for outcome in ("pending", "lost")),
    *(f"submit_evaluation:{reason}" for reason in ("ok", "stale_term", "evaluation_exists", "invalid_field")),
    *(f"extend:{state}" for state in ("live", "lost")),
    *(f"lease:{wait}:False:False" for wait in ("paused", "quarantined", "no_tasks", "backing_off", "engine_stale")),
    *("lease:engine_stale:False:True", "lease:None:True:False", "lease:no_tasks:True:False", "lease:None:False:True"),
    *("delete_evaluation:ok", "delete_evaluation:unknown_evaluation", "lease:store_rolled_back"),
)


def agree(subject: StoreSubject, operations: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(-(-operations // HISTORY)):
        History(subject, f"run-{seed}", seed, seen).run()
    print("\n".join(f"{name} {seen[name]}" for name in sorted(seen)))
    assert operations < 6_000 or [name for name in OUTCOMES if not seen[name]] == []


@pytest.mark.timeout(1_800)
def test_the_store_evaluates_on_valkey_as_the_model_does(valkey: StoreSubject) -> None:
    agree(valkey, OPERATIONS)


@pytest.mark.redis7
@pytest.mark.timeout(1_800)
def test_the_store_evaluates_on_redis_7_as_the_model_does(redis_7: StoreSubject) -> None:
    agree(redis_7, OPERATIONS)
