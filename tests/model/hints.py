"""Whoever waits is told when its wait could end: the hints of an operation, against what has become possible.

Five parties wait: a trainer for the next micro-batch (topic groups), a worker for a task (tasks), one of a stage for a
group (stages); blocked pushes for room (space), and an engine for its turn to load (weights). After each operation
every party is tried on a copy of the model; one that could not go on before the operation and can now must have been
hinted at. Time alone publishes nothing; a wait looks again by itself after a while.
"""

import pickle
from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.ops import LeaseWait, PushKind
from buffer_service.domain.ports import Topic
from buffer_wire.errors import RolloutBufferError
from tests.model.notation import Entry
from tests.model.pair import Pair
from tests.model.subjects import StoreSubject
from tests.oracle import ReferenceModel

ROOM_ALONE = {PushKind.QUEUED, PushKind.BLOCKED}
"""Room alone: whose task has ended in the meantime is not told: it finds out when it looks again by itself, and those
behind it are told then.
"""


class HintedPair(Pair):
    """A pair whose subject is a store, and who watches its hints."""

    subject: StoreSubject
    pull: ops.Pull | None = None
    """The pull that waits."""

    def do(self, entry: Entry) -> Any:
        before, watched = self._possible(), self._watched()
        waited = self.pull
        tickets = self.subject.tickets(self.run_id)
        reply = super().do(entry)
        if entry.operation == "pull":
            # One trainer at a time: its last pull waits.
            self.pull = entry.args[0] if isinstance(reply, ops.Short) else None
        if entry.operation == "time" or self.view is None or not before:
            return reply
        told = {topic for topic, ticket in self.subject.tickets(self.run_id).items() if ticket > tickets[topic]}
        for topic, possible in self._possible().items():
            if topic not in before or (topic is Topic.GROUPS and self.pull is not waited):
                continue  # nobody waited for it
            if possible and not before[topic] and topic not in told:
                raise self._disagreement(f"hint missing: {topic} after {entry.operation}: {possible}")
            self.seen[f"hint:{topic}"] += bool(possible and not before[topic])
            self.seen[f"hint:{topic}:in vain"] += topic in told and not possible
        if watched != self._watched() and Topic.WEIGHTS not in told:
            raise self._disagreement(f"hint missing: {Topic.WEIGHTS} after {entry.operation}: {self._watched()}")
        self._follow(entry, told)
        return reply

    def _watched(self) -> tuple[Any, ...]:
        """Return what a watch of the weights sends anew when it changes."""
        if self.view is None:
            return ()
        weights = self.model.weights(self.run_id)
        return weights.published, weights.manifest, weights.paused, weights.plan

    def _follow(self, entry: Entry, told: set[Topic]) -> None:
        """Look again where told, as the service does: the store knows of those who wait what they said last."""
        if Topic.GROUPS in told and self.pull is not None and entry.operation != "pull":
            self.do(Entry("pull", (self.pull,)))
        if Topic.SPACE in told:
            for replica in sorted({one.replica for one in self.waiting.values()}):
                names = tuple(one.name for one in self.waiting.values() if one.replica == replica)
                self.do(Entry("retry_push", names=names, replica=replica))

    def _possible(self) -> dict[Topic, str]:
        """Return what each party could do, empty for nothing."""
        view = self.view
        if view is None:
            return {}
        state = pickle.dumps(self.model._runs[self.run_id])
        possible = {}
        if self.pull is not None:
            pulled = self._try(state, "pull", self.pull)
            possible[Topic.GROUPS] = "" if isinstance(pulled, ops.Short) else type(pulled).__name__
        ask = ops.LeaseAsk("waits", "p1", "waits", "waits", view.published, 1)
        leased = self._try(state, "lease", ask)
        if isinstance(leased, ops.Leased):
            ended = leased.grants or leased.wait in {LeaseWait.PAUSED, LeaseWait.DRAINING}
            possible[Topic.TASKS] = f"{len(leased.grants)} {leased.wait}" if ended else ""
        possible[Topic.STAGES] = ""
        for stage in view.policy.stages:
            asked = self._try(state, "lease_groups", ops.StageAsk(stage, "waits", "waits", "waits", 1))
            if isinstance(asked, ops.StageLeased) and asked.leases:
                possible[Topic.STAGES] += f" {stage}"
        possible[Topic.WEIGHTS] = "load" if self.model.weights(self.run_id).may_load else ""
        waiting = list(self.waiting.values())
        possible[Topic.SPACE] = ""
        for replica in sorted({one.replica for one in waiting}):
            mine = [(one.facts, one.key) for one in waiting if one.replica == replica]
            retried = self._try(state, "retry_push", mine)
            if isinstance(retried, ops.PushResult) and {one.kind for one in retried.outcomes} <= ROOM_ALONE:
                queued = [one.group_id for one in retried.outcomes if one.kind is PushKind.QUEUED]
                possible[Topic.SPACE] += " ".join(queued)
        return possible

    def _try(self, state: bytes, operation: str, *args: Any) -> Any:
        model = ReferenceModel(lambda: self.now)
        model._runs[self.run_id] = pickle.loads(state)
        try:
            return getattr(model, operation)(self.run_id, *args)
        except RolloutBufferError as refusal:
            return refusal
