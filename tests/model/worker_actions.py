"""Actions of feeders and workers: submit, lease, push, retry, extend, give back, report."""

import dataclasses
from collections.abc import Sequence

from buffer_service.domain import ops
from buffer_wire.limits import MAX_MESSAGE_BYTES
from buffer_wire.payloads.keys import NONCE_BYTES
from tests.model.choices import History
from tests.model.drawing import Draw
from tests.model.notation import Entry
from tests.model.universe import (
    COUNTERS,
    ENGINES,
    ENVIRONMENTS,
    INSTANCES,
    MESSAGES,
    OWN_TASKS,
    PRIORITIES,
    TASKS,
    WORKERS,
)

TASK_NAMES = ("", "", *TASKS)
LEASELESS = (*OWN_TASKS, *OWN_TASKS, *TASKS)


class WorkerActions(History):
    """Each method is one action; some are what happens in a row."""

    # ── tasks ──

    def submit(self, draw: Draw) -> None:
        if self.submits and draw.rarely():
            request = draw.recent(self.submits)
            self.pair.seen["submit:repeated"] += request is self.submits[-1]
        else:
            tasks = [
                ops.NewTask(
                    draw.pick(TASK_NAMES),
                    2,
                    draw.pick(PRIORITIES),
                    draw.pick(ENVIRONMENTS),
                    b"spec %d" % i,
                    draw.pick((0, 5, 7, 7)),
                )
                for i in range(0 if draw.rarely() else draw.integer(1, 4))
            ]
            cursor = self.view.cursor
            expected = cursor - (1 if draw.rarely(24) else 0)
            state = b"state %d" % cursor
            request = ops.Submit(
                self.term(draw), self.request_id(), expected, cursor + draw.integer(0, 1), state, tasks
            )
            self.submits.append(request)
        self.pair.both("submit", request)

    def lease(self, draw: Draw) -> None:
        if self.asks and draw.rarely(10):
            ask = draw.recent(self.asks)
        else:
            worker = draw.pick(WORKERS)
            if draw.rarely(10):
                self.instances[worker] = draw.pick(INSTANCES)
            loaded = self.versions[-1] if draw.rarely(2) else draw.recent(self.versions)
            instance, engine, count = self.instances[worker], draw.pick(ENGINES), draw.integer(1, 4)
            message_bytes = draw.pick(MESSAGES) if draw.rarely(3) else MAX_MESSAGE_BYTES
            ask = ops.LeaseAsk(worker, instance, self.request_id(), engine, loaded, count, message_bytes)
        repeated = ask in self.asks
        self.asks.append(ask)
        leased = self.pair.both("lease", ask)
        if leased is not None:
            self.grants.extend((ask.worker_id, ask.instance_id, grant) for grant in leased.grants)
            self.pair.seen["lease:repeated"] += repeated and bool(leased.grants)

    def extend(self, draw: Draw) -> None:
        worker, instance, _ = self.holder(draw)
        lease_ids = [*self.pair.inside.leases(), *(grant.lease_id for _, _, grant in self.grants[-2:])]
        self.pair.both("extend", worker, instance, lease_ids)

    def give_back(self, draw: Draw) -> None:
        worker, instance, _ = self.holder(draw)
        returns = []
        for _ in range(draw.integer(1, 2)):
            lease_id = self.holder(draw)[2].lease_id
            kind = draw.pick(tuple(ops.ReturnKind))
            error = f"error of {lease_id}" if kind is ops.ReturnKind.FAILED else ""
            body = b"" if draw.rarely(3) else b"kept by " + lease_id.encode()
            head = self.span(draw)[0] if body and not draw.rarely(8) else None
            returns.append(ops.LeaseReturn(lease_id, kind, error, body, head, len(body)))
        self.pair.both("give_back", worker, instance, returns)
        if draw.rarely(3):
            # A reply has no room for what was kept.
            self.lease_with(self.versions[-1], 1, MESSAGES[0])

    def keep(self, draw: Draw, head: ops.WeightVersion) -> None:
        """A lease comes back with a partial rollout."""
        worker, instance, grant = self.holder(draw)
        kept = ops.LeaseReturn(grant.lease_id, ops.ReturnKind.INTERRUPTED, "", b"kept", head, 4)
        self.pair.both("give_back", worker, instance, [kept])

    def report_engine(self, draw: Draw) -> None:
        state = draw.pick(("ready", "ready", "ready", "quarantined"))
        errors = draw.integer(0, 2)
        tokens, busy_ms, request_ms = draw.pick(COUNTERS)
        report = ops.EngineReport(
            draw.pick(ENGINES),
            "w1",
            state,
            self.versions[-1],
            len(self.versions),
            12,
            "why" * errors,
            errors,
            decoded_tokens=tokens,
            decode_busy_ms=busy_ms,
            decode_request_ms=request_ms,
        )
        self.pair.both("report_engine", report)

    # ── groups ──

    def push_results(self, draw: Draw) -> None:
        leases = self.pair.inside.leases()
        live = [grant for _, _, grant in self.grants if grant.lease_id in leases]
        count = draw.integer(1, 3)
        late = not live or draw.rarely(3)
        grants = [draw.recent(self.grants)[2] for _ in range(count)] if late else live[:count]
        self.push_grants(draw, grants)

    def push_grants(self, draw: Draw, grants: Sequence[ops.LeaseGrant]) -> None:
        """Groups of leases, mostly of their task's environment."""
        environments = self.pair.inside.environments()
        facts = []
        for grant in grants:
            environment = "" if draw.rarely(6) else environments.get(grant.task_id, "")
            facts.append(self.facts(draw, grant.task_id, grant.incarnation, grant.lease_id, environment))
        self.send(draw, facts)

    def work(self, draw: Draw, count: int = 4) -> None:
        """New tasks, leased and pushed at once, some after a failure, so that groups have priorities and pasts."""
        grants = self.lease_new(draw, count)
        if grants and draw.rarely(3):
            failed = [ops.LeaseReturn(g.lease_id, ops.ReturnKind.FAILED, "failed", b"", None, 0) for g in grants[:2]]
            self.pair.both("give_back", WORKERS[0], self.instances[WORKERS[0]], failed)
            self.pair.do(Entry("time", (100,)))
            grants = [*grants[2:], *self.lease_with_the_newest(2)]
        if grants:
            self.push_grants(draw, grants)

    def lease_new(self, draw: Draw, count: int) -> list[ops.LeaseGrant]:
        """New tasks, leased at once."""
        cursor = self.view.cursor
        tasks = [
            ops.NewTask(f"work-{self.number()}", 2, draw.pick(PRIORITIES), draw.pick(ENVIRONMENTS), b"")
            for _ in range(count)
        ]
        self.pair.both("submit", ops.Submit(self.view.term, self.request_id(), cursor, cursor, b"", tasks))
        return self.lease_with_the_newest(count)

    def lease_with_the_newest(self, count: int) -> list[ops.LeaseGrant]:
        """Lease to an engine that has the published weights."""
        return self.lease_with(self.versions[-1], count)

    def lease_with(
        self, loaded: ops.WeightVersion, count: int, message_bytes: int = MAX_MESSAGE_BYTES
    ) -> list[ops.LeaseGrant]:
        """Lease to an engine that has these weights."""
        worker = WORKERS[0]
        ask = ops.LeaseAsk(worker, self.instances[worker], self.request_id(), ENGINES[0], loaded, count, message_bytes)
        leased = self.pair.both("lease", ask)
        grants = list(leased.grants) if leased is not None else []
        self.grants.extend((ask.worker_id, ask.instance_id, grant) for grant in grants)
        return grants

    def push_without_lease(self, draw: Draw) -> None:
        names = [draw.pick(LEASELESS) for _ in range(draw.integer(1, 3))]
        incarnation = 1 if draw.rarely(16) else 0
        self.send(draw, [self.facts(draw, name, incarnation, "") for name in names])

    def write_and_push(self, draw: Draw) -> None:
        """Groups that their pusher has written, or not, or in another length, and some that are relayed."""
        leases = self.pair.inside.leases()
        live = [grant for _, _, grant in self.grants if grant.lease_id in leases][:2]
        owners = [(grant.task_id, grant.incarnation, grant.lease_id) for grant in live]
        owners += [(draw.pick(LEASELESS), 0, "") for _ in range(draw.integer(0 if live else 1, 2))]
        for owner in owners:
            number = self.number()
            body = b"written %d" % number
            facts = dataclasses.replace(
                self.facts(draw, *owner), stored=True, size_bytes=len(body) + (1 if draw.rarely(12) else 0)
            )
            self.written.append(ops.NewGroup(facts, body, nonce=number.to_bytes(NONCE_BYTES)))
            if not draw.rarely(12):
                self.pair.both("write", self.written[-1])
        self.push_written(draw, self.written[-len(owners) :])

    def push_written(self, draw: Draw, written: Sequence[ops.NewGroup]) -> None:
        """Push what was written by what their headers say, sometimes beside a group that is relayed."""
        groups = [dataclasses.replace(group, body=b"") for group in written]
        if draw.rarely(3):
            groups.append(ops.NewGroup(self.facts(draw, draw.pick(LEASELESS), 0, ""), b"relayed"))
        names = tuple(f"g{self.number()}" for _ in groups)
        self.pair.do(Entry("push", (groups,), names, replica=draw.integer(0, 1)))

    def push_written_again(self, draw: Draw) -> None:
        """A push whose answer got lost, and perhaps its write too; sometimes after everything expired that may."""
        again = [draw.recent(self.written)]
        if draw.rarely(2):
            again.append(draw.pick(self.written[-16:]))
        if draw.rarely(4):
            self.pair.both("expire_written")
        for group in again if draw.rarely(3) else ():
            self.pair.both("write", group)
        self.pair.seen["written:again"] += 1
        self.push_written(draw, again)

    def expire_written(self, draw: Draw) -> None:
        del draw
        self.pair.both("expire_written")

    def push_again(self, draw: Draw) -> None:
        # Often one whose task may be trained and forgotten by now.
        self.send(draw, [draw.pick(self.pushes[-32:]) if draw.rarely(2) else draw.recent(self.pushes)])

    def push_forged(self, draw: Draw) -> None:
        """Leases that were never given, of tasks that there are and of others."""
        open_tasks = self.pair.inside.attempts()
        task_id, incarnation, attempt = draw.pick(open_tasks) if open_tasks else (draw.pick(TASKS), 0, 1)
        incarnation = max(0, incarnation + draw.pick((0, 0, 1, -1)))
        forged = (
            f"{task_id}/{incarnation}/{attempt + 1}",
            f"{task_id}/{incarnation}/{max(1, attempt)}",
            f"{task_id}/{incarnation}/0",
            f"z/{incarnation}/1",
            "malformed",
            f"{task_id}/0{incarnation}/1",
        )
        self.send(draw, [self.facts(draw, task_id, incarnation, draw.pick(forged))])

    def flood(self, draw: Draw) -> None:
        """More groups than fit, with names of their own."""
        facts = [self.facts(draw, f"flood-{self.number()}", 0, "") for _ in range(draw.integer(2, 4))]
        self.send(draw, facts)

    def retry_blocked(self, draw: Draw) -> None:
        """A replica tries its blocked groups again, all or some, or their callers are gone."""
        replica = draw.pick([one.replica for one in self.pair.waiting.values()])
        names = [one.name for one in self.pair.waiting.values() if one.replica == replica]
        if len(names) > 1 and draw.rarely(4):
            names = names[draw.integer(0, 1) :: 2]
        if len(names) > 1 and draw.rarely(4):
            names.reverse()
        operation = "abandon_push" if draw.rarely(12) else "retry_push"
        self.pair.do(Entry(operation, names=tuple(names), replica=replica))
