"""Actions of workers of stages: lease groups, add columns or rewards, prolong and return."""

import dataclasses

from buffer_service.domain import ops
from buffer_wire.payloads.keys import NONCE_BYTES
from tests.model.drawing import Draw
from tests.model.universe import STAGES, WORKERS
from tests.model.worker_actions import WorkerActions

MOST = 4


class StageActions(WorkerActions):
    """Each method is one action; some are what happens in a row."""

    def lease_groups(self, draw: Draw) -> None:
        """A worker asks for groups, rarely once more with the same request, or for a stage that may not be there."""
        asks = self.stage_asks
        if asks and draw.rarely(6):
            ask = draw.recent(asks)
        else:
            stage = draw.pick(self.view.policy.stages or STAGES) if not draw.rarely(12) else draw.pick(STAGES)
            worker = draw.pick(WORKERS)
            if draw.rarely(8):
                self.instances[worker] = draw.pick(("p1", "p2"))
            ask = ops.StageAsk(stage, worker, self.instances[worker], self.request_id(), draw.integer(1, MOST))
        repeated = ask in asks
        asks.append(ask)
        leased = self.pair.both("lease_groups", ask)
        if leased is not None:
            self.stage_leases += [lease.lease_id for lease in leased.leases]
            self.pair.seen["stage:repeated"] += repeated and bool(leased.leases)
            self.pair.seen["stage:leased"] += bool(leased.leases)
            if leased.leases and draw.rarely(2):
                again = self.pair.both("lease_groups", ask)
                self.pair.seen["stage:repeated"] += again is not None and bool(again.leases)

    def add_columns(self, draw: Draw) -> None:
        """Columns for what is held, now and then for what was."""
        held = self.pair.inside.stages()
        leases = draw.recent(self.stage_leases) if self.stage_leases and (not held or draw.rarely(4)) else ""
        self.push_columns(draw, [leases] if leases else list(held)[: draw.integer(1, MOST)])

    def push_columns(self, draw: Draw, lease_ids: list[str]) -> None:
        """Push for leases of stages: mostly what fits, some of it written before."""
        held, facts = self.pair.inside.stages(), []
        for lease_id in lease_ids:
            task_id, incarnation, _ = lease_id.split("/")
            made = self.facts(draw, task_id if not draw.rarely(24) else "z", int(incarnation), lease_id)
            group = held[lease_id][0].facts if lease_id in held else made
            if not draw.rarely(6):
                samples = group.samples + draw.rarely(8)
                made = dataclasses.replace(made, samples=samples, tokens=group.tokens)
            if draw.rarely(24):
                made = dataclasses.replace(made, lease_id=lease_id[:-1] + "9")
            facts.append(made)
        if facts and draw.rarely(2):
            number = self.number()
            body = b"written %d" % number
            made = dataclasses.replace(facts.pop(), stored=True, size_bytes=len(body))
            self.written.append(ops.NewGroup(made, body, nonce=number.to_bytes(NONCE_BYTES)))
            self.pair.both("write", self.written[-1])
            self.push_written(draw, self.written[-1:])
        if facts:
            self.send(draw, facts)

    def pass_stages(self, draw: Draw) -> None:
        """Every stage adds to whatever waits in it."""
        worker = WORKERS[0]
        for stage in self.view.policy.stages:
            ask = ops.StageAsk(stage, worker, self.instances[worker], self.request_id(), 16)
            leased = self.pair.both("lease_groups", ask)
            if leased is not None and leased.leases:
                self.stage_leases += [lease.lease_id for lease in leased.leases]
                self.push_columns(draw, [lease.lease_id for lease in leased.leases])

    def keep_groups(self, draw: Draw) -> None:
        """Leases of stages are prolonged, or handed back."""
        held = self.pair.inside.stages()
        lease_ids = [*held, *self.stage_leases[-2:]][:MOST]
        worker = draw.pick(WORKERS)
        instance = self.instances[worker]
        if held and not draw.rarely(4):
            _, hold = draw.pick(list(held.values()))
            worker, instance = hold.worker_id, hold.instance_id
        if draw.rarely(2):
            self.pair.both("extend", worker, instance, lease_ids)
            return
        kinds = [draw.pick(tuple(ops.ReturnKind)) for _ in lease_ids]
        returns = [
            ops.LeaseReturn(one, kind, "no" * (kind is ops.ReturnKind.FAILED), b"", None, 0)
            for one, kind in zip(lease_ids, kinds, strict=True)
        ]
        if returns:
            self.pair.both("give_back", worker, instance, returns)
