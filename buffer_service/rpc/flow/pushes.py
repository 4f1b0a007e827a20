"""Pushes into a run's queue, first come, first served while it is full.

Invariants: a push is tried at once, which gives its blocked groups a place in the run's line. The store keeps the line
over all replicas. The bodies of a blocked push lie in the store under their payload keys. Keys that did not become
groups are abandoned, whatever ends the wait. Of those who wait on a replica one tries for all, in the order in which
they came. Each try also keeps leases alive and tells the store that the bodies are still wanted. The store gives up
bodies that no replica came for. Should one come after all, the caller is told to push again, for the body is gone.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.janitor import Janitor
from buffer_wire.errors import NotReady
from buffer_wire.revision import Revision

RETRY_S = 0.5
"""Leases may be as short as a second."""


class Pushes:
    """The pushes of one replica."""

    def __init__(self, store: RunStore, lines: WaitingLines, janitor: Janitor, metrics: RpcMetrics) -> None:
        self._store = store
        self._lines = lines
        self._janitor = janitor
        self._metrics = metrics
        self._waiting: dict[str, list[_Push]] = {}
        """Waiting pushes by run, in the order of the run's line."""

    async def push(
        self, run_id: str, groups: Sequence[ops.NewGroup], seen: Revision, stored: Callable[[], None] = lambda: None
    ) -> tuple[Revision, ops.WeightVersion]:
        """Push groups in order and set their outcomes; while the queue is full and the policy says `block`, wait. The
        revision and the published weights after it.

        `stored` is called once the bodies are not needed here any longer. No outcome is BLOCKED or GONE. Raises what
        the store raises, and NotReady when the process shuts down meanwhile, or the store has given up a body.
        """
        push = _Push(groups)
        await self._first_try(run_id, push, seen)
        stored()
        if not push.blocked:
            return push.result()
        with self._metrics.blocked():
            line = self._waiting.setdefault(run_id, [])
            line.append(push)
            try:
                return await self._stand_in_line(run_id, push)
            finally:
                line.remove(push)
                if not line:
                    del self._waiting[run_id]
                self._give_up_blocked(run_id, push)

    def _give_up_blocked(self, run_id: str, push: "_Push") -> None:
        if push.blocked:
            self._janitor.abandon(run_id, [key for key, _ in push.blocked])

    async def _first_try(self, run_id: str, push: "_Push", seen: Revision) -> None:
        trying = asyncio.ensure_future(self._store.push(run_id, push.groups, seen_revision=seen))
        try:
            push.settle(await asyncio.shield(trying))
        except asyncio.CancelledError:
            # The store decides all the same, and nobody would come again for what it blocks. A caller may be cancelled
            # more than once, and then waits no longer.
            trying.add_done_callback(partial(self._give_up, run_id, push))
            await asyncio.wait([trying])
            raise
        # The store has the bodies now: a wait must not hold on to them.
        for group in push.groups:
            group.body = b""

    def _give_up(self, run_id: str, push: "_Push", trying: asyncio.Future[ops.PushResult]) -> None:
        """Give up what the first try has blocked."""
        if not trying.cancelled() and trying.exception() is None:
            push.settle(trying.result())
            self._give_up_blocked(run_id, push)

    async def _stand_in_line(self, run_id: str, push: "_Push") -> tuple[Revision, ops.WeightVersion]:
        async with self._lines.turn(run_id, Topic.SPACE):
            while True:
                ticket = self._lines.ticket(run_id, Topic.SPACE)
                await self._try_again(run_id)
                if push.gone or not push.blocked:
                    return push.result()
                await self._lines.hint(run_id, Topic.SPACE, ticket, longest_s=RETRY_S)

    async def _try_again(self, run_id: str) -> None:
        tried = [(push, key, group) for push in self._waiting[run_id] for key, group in push.blocked]
        if not tried:
            # Whoever was at the head before has tried for this one too.
            return
        result = await self._store.retry_push(run_id, [(group.facts, key) for _, key, group in tried])
        for push in {push for push, _, _ in tried}:
            push.blocked.clear()
        for (push, _, group), outcome in zip(tried, result.outcomes, strict=True):
            push.take(group, outcome, result)


class _Push:
    """A push: its groups, and those of them that are blocked with their payload keys, which a client may repeat."""

    def __init__(self, groups: Sequence[ops.NewGroup]) -> None:
        self.groups = groups
        self.blocked: list[tuple[str, ops.NewGroup]] = []
        self.gone = False
        self._last: ops.PushResult | None = None

    def settle(self, result: ops.PushResult) -> None:
        """Take the outcomes of the first try."""
        self._last = result
        for group, outcome in zip(self.groups, result.outcomes, strict=True):
            self.take(group, outcome, result)

    def take(self, group: ops.NewGroup, outcome: ops.Pushed, result: ops.PushResult) -> None:
        """Take the outcome of a group's last try."""
        self._last = result
        group.outcome = outcome
        self.gone |= outcome.kind is ops.PushKind.GONE
        if outcome.kind is ops.PushKind.BLOCKED:
            if group.facts.first_revision:
                # As of this revision it was not accepted: however long it waits now, it is not forgotten.
                group.facts = replace(group.facts, first_revision=int(result.revision))
            self.blocked.append((outcome.payload_key, group))

    def result(self) -> tuple[Revision, ops.WeightVersion]:
        """Revision and published weights as of the last try, once nothing is blocked. Raises NotReady."""
        if self._last is None:
            raise RuntimeError("no try was made")
        if self.gone:
            raise NotReady("a group that waited for room was given up, as its replica did not come; push it again")
        return self._last.revision, self._last.published
