"""What feeders and workers do: submit, lease, push, retry, extend, give back, report."""

from hypothesis import strategies as st

from buffer_service.domain import ops
from tests.model.choices import History, rarely
from tests.model.universe import ENGINES, INSTANCES, OWN_TASKS, TASKS, WORKERS


class WorkerActions(History):
    """Each method is one action."""

    def submit(self, draw: st.DataObject) -> None:
        if self.submits and rarely(draw):
            request = self.recent(draw, self.submits)
            self.pair.seen["submit:repeated"] += request is self.submits[-1]
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
            self.pair.seen[f"lease:{leased.wait or 'granted'}"] += 1
            self.pair.seen["lease:repeated"] += repeated and bool(leased.grants)
            self.pair.seen["lease:continued"] += any(grant.continuation for grant in leased.grants)

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
            self.pair.seen.update("extend:live" if live else "extend:lost" for live in extended.live)

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
            self.pair.seen.update(f"give_back:{outcome}" for outcome in returned.outcomes)

    def report_engine(self, draw: st.DataObject) -> None:
        engine = draw.draw(st.sampled_from(ENGINES))
        state = draw.draw(st.sampled_from(["ready", "ready", "ready", "quarantined"]))
        errors, loaded = draw.draw(st.integers(0, 2)), self.versions[-1]
        report = ops.EngineReport(engine, "w1", state, loaded, len(self.versions), 12, "why" * errors, errors)
        self.pair.both("report_engine", report)
