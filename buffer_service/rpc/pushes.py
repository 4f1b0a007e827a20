"""Pushes into a run's queue, first come, first served while it is full.

Invariants: while somebody waits in a run's line nobody else's push is tried; the bodies of a blocked push lie in the
store under their payload keys, and keys that did not become groups are abandoned, whatever ends the wait.
"""

from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.janitor import Janitor
from buffer_service.rpc.waiting import Lines

RETRY_S = 0.5
"""Each try keeps the leases of what is blocked alive, and they may be as short as a second."""


class Pushes:
    """The pushes of one replica."""

    def __init__(self, store: RunStore, lines: Lines, janitor: Janitor, metrics: RpcMetrics) -> None:
        self._store = store
        self._lines = lines
        self._janitor = janitor
        self._metrics = metrics

    async def push(self, run_id: str, groups: list[ops.NewGroup], seen_revision: int) -> ops.PushResult:
        """Push groups (the list is emptied) in order; while the queue is full and the policy says `block`, wait.

        Raises what the store raises, and NotReady when the process shuts down meanwhile.
        """
        push = _Push(self._store, run_id, groups, seen_revision)
        try:
            if self._lines.is_empty(run_id, Topic.SPACE):
                result = await push.attempt()
                if not push.blocked:
                    return result
            with self._metrics.blocked():
                return await self._stand_in_line(run_id, push)
        finally:
            if push.blocked:
                self._janitor.abandon(run_id, [key for _, key in push.blocked.values()])

    async def _stand_in_line(self, run_id: str, push: "_Push") -> ops.PushResult:
        async with self._lines.turn(run_id, Topic.SPACE):
            while True:
                ticket = self._lines.ticket(run_id, Topic.SPACE)
                result = await push.attempt()
                if not push.blocked:
                    return result
                await self._lines.hint(run_id, Topic.SPACE, ticket, longest_s=RETRY_S)


class _Push:
    """One push: its outcomes so far, and what of it is blocked, by position."""

    def __init__(self, store: RunStore, run_id: str, groups: list[ops.NewGroup], seen_revision: int) -> None:
        self._store = store
        self._run_id = run_id
        self._facts = [group.facts for group in groups]
        self._groups = groups
        self._seen_revision = seen_revision
        self._outcomes: dict[int, ops.Pushed] = {}
        self.blocked: dict[int, tuple[ops.GroupFacts, str]] = {}

    async def attempt(self) -> ops.PushResult:
        """Try what is not settled."""
        if self._groups:
            positions = list(range(len(self._facts)))
            result = await self._store.push(self._run_id, self._groups, seen_revision=self._seen_revision)
            # The store has the bodies now: a wait must not hold on to them.
            self._groups.clear()
        else:
            positions = list(self.blocked)
            result = await self._store.retry_push(
                self._run_id, list(self.blocked.values()), seen_revision=self._seen_revision
            )
        for position, outcome in zip(positions, result.outcomes, strict=True):
            self._outcomes[position] = outcome
            if outcome.kind is ops.PushKind.BLOCKED:
                self.blocked[position] = (self._facts[position], outcome.payload_key)
            else:
                self.blocked.pop(position, None)
        outcomes = [self._outcomes[position] for position in range(len(self._facts))]
        return ops.PushResult(result.revision, outcomes, result.published)
