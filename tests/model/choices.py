"""State of a history so far, and what its next operation may be about.

Choices prefer what means something in the present state (live leases, the next step, the present term) and now and
then take what does not.
"""

import struct
from collections.abc import Sequence

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from tests.model.drawing import Draw
from tests.model.notation import Entry
from tests.model.pair import Pair
from tests.model.universe import (
    BODIES,
    ENVIRONMENTS,
    INSTANCES,
    LENGTHS,
    MEANS,
    REWARD_SUMS,
    REWARDS,
    SIZES,
    TOKENS,
    WORKERS,
)

Held = tuple[str, str, ops.LeaseGrant]
"""Worker, instance, grant."""


class History:
    """One run on both sides, and everything that was done to it."""

    def begin(self, pair: Pair) -> None:
        """Nothing was done yet."""
        self.pair = pair
        self.requests = 0
        self.forget()

    def forget(self) -> None:
        """The run is new."""
        self.grants: list[Held] = []
        """Every lease ever given."""
        self.instances = dict.fromkeys(WORKERS, INSTANCES[0])
        self.asks: list[ops.LeaseAsk] = []
        self.stage_asks: list[ops.StageAsk] = []
        self.stage_leases: list[str] = []
        """Every lease of a stage ever given."""
        self.pushes: list[ops.GroupFacts] = []
        self.written: list[ops.NewGroup] = []
        """Groups that their pushers have written to the store, with their bodies."""
        self.submits: list[ops.Submit] = []
        self.resumes: list[ops.Resume] = []
        self.versions = [WeightVersion(1, 0)]
        """Every pair that was ever published, in order."""

    @property
    def view(self) -> ops.RunView:
        assert self.pair.view is not None
        return self.pair.view

    def number(self) -> int:
        """A number of its own."""
        self.requests += 1
        return self.requests

    def request_id(self) -> str:
        return f"r{self.number()}"

    def term(self, draw: Draw) -> int:
        """The present term, rarely another."""
        return self.view.term + (draw.pick((-1, 1)) if draw.rarely(24) else 0)

    def span(self, draw: Draw) -> tuple[WeightVersion, WeightVersion]:
        """Head and tail among versions that were published, most often the newest; rarely one to come."""
        last = len(self.versions) - 1
        first = max(0, last - draw.pick((0, 0, 1, 2, 4)))
        if draw.rarely(16):
            return self.versions[first], WeightVersion(self.view.term, self.view.published.version + 1)
        return self.versions[first], self.versions[draw.integer(first, last)]

    def facts(self, draw: Draw, task_id: str, incarnation: int, lease_id: str, environment: str = "") -> ops.GroupFacts:
        head, tail = self.span(draw)
        tokens = draw.pick(TOKENS)
        equal, mean_reward = draw.pick(REWARDS)
        shortest, longest = draw.pick(LENGTHS)
        samples = draw.integer(1, 3)
        lengths = [longest, shortest, draw.pick((1, 7, 1 << 22))][:samples]
        low, high = sorted((head.version, tail.version))
        floats = bytes(4 * samples) if self.view.policy.record_groups else b""
        return ops.GroupFacts(
            task_id=task_id,
            incarnation=incarnation,
            lease_id=lease_id,
            environment=environment or draw.pick(ENVIRONMENTS),
            samples=samples,
            tokens=tokens,
            loss_tokens=tokens // 2,
            size_bytes=draw.pick(SIZES),
            head=head,
            tail=tail,
            spans_versions=head != tail,
            mean_milli=low * 1_000 + (high - low) * draw.pick(MEANS),
            equal_rewards=equal,
            mean_reward_milli=mean_reward,
            response_lengths=struct.pack(f"<{samples}I", *lengths),
            rewards=floats,
            min_response_tokens=shortest,
            max_response_tokens=longest,
            response_tokens=sum(lengths),
            reward_milli=draw.pick(REWARD_SUMS),
            turns=samples + draw.pick((0, 0, 5)),
            truncated_samples=draw.integer(0, samples),
            failed_samples=draw.integer(0, 1),
            first_revision=0
            if lease_id
            else draw.pick((0, self.view.revision, self.view.revision, 1 + self.view.revision // 2)),
            version_tokens=draw.pick(((), _split(sum(lengths), head, tail))) if head != tail else (),
            trajectories=draw.pick((0, 0, 1, samples)),
        )

    def send(self, draw: Draw, facts: Sequence[ops.GroupFacts]) -> ops.PushResult | None:
        """A push by one of the replicas."""
        names = tuple(f"g{self.number()}" for _ in facts)
        end = draw.pick(BODIES)
        groups = [ops.NewGroup(fact, name.encode() + end) for name, fact in zip(names, facts, strict=True)]
        self.pushes.extend(facts)
        pushed: ops.PushResult | None = self.pair.do(Entry("push", (groups,), names, replica=draw.integer(0, 1)))
        return pushed

    def holder(self, draw: Draw) -> Held:
        """Pick who was given a lease, mostly one that is live."""
        leases = self.pair.inside.leases()
        live = [held for held in self.grants if held[2].lease_id in leases]
        return draw.recent(self.grants if not live or draw.rarely(4) else live)

    def world_size(self, draw: Draw) -> int:
        """The trainer's; any before its first step."""
        return self.view.world_size or draw.integer(1, 3)


def _split(tokens: int, head: WeightVersion, tail: WeightVersion) -> list[tuple[WeightVersion, int]]:
    """Response tokens of a group by versions below the tail: the head, and one between them."""
    middle = WeightVersion(head.term, (head.version + tail.version) // 2)
    return sorted({head: tokens // 3, middle: tokens // 3}.items())
