"""What a history has so far, and what its next operation may be about.

Choices prefer what means something in the present state (live leases, the next step, the present epoch) and now and
then take what does not.
"""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from tests.model.pair import Blocked, Pair
from tests.model.universe import BODY_KINDS, INSTANCES, WORKERS, group_sizes

T = TypeVar("T")


def rarely(draw: st.DataObject, one_in: int = 8) -> bool:
    """True once in so many times; simplest is False."""
    return draw.draw(st.integers(0, one_in - 1)) == one_in - 1


class History:
    """One run on both sides, and everything that was done to it."""

    def begin(self, pair: Pair) -> None:
        """Nothing was done yet."""
        self.pair = pair
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
            self.pair.seen.update(f"{operation}:{outcome.kind}" for outcome in reply.outcomes)
