"""Pushes: groups and their payloads, in portions that do not hold up the store."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buffer_service.commands import abandon_push
from buffer_service.commands.groups import push_portion
from buffer_service.domain import ops
from buffer_service.store.calls import Calls
from buffer_service.store.recent import RecentPayloads
from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.keys import new_nonce, payload_key
from buffer_wire.revision import NO_REVISION, Revision


@dataclass(slots=True)
class _Try:
    """A group of a push, from its facts to its outcome."""

    facts: ops.GroupFacts
    key: str
    body: ops.Buffer = b""
    outcome: ops.Pushed | None = None

    def is_now(self, kind: ops.PushKind) -> bool:
        return self.outcome is not None and self.outcome.kind is kind


class Pushing:
    """Push, and retry. What was queued is kept in memory for the pull that wants it."""

    def __init__(self, calls: Calls, recent: RecentPayloads) -> None:
        self._calls = calls
        self._recent = recent

    async def push(self, run_id: str, groups: Sequence[ops.NewGroup], seen_revision: Revision) -> ops.PushResult:
        """Store payloads and index them."""
        tries = [
            _Try(
                group.facts,
                payload_key(run_id, group.nonce or new_nonce(), group.checksum, group.facts.size_bytes, group.parts),
                group.body,
            )
            for group in groups
        ]
        results: list[ops.PushResult] = []
        try:
            for portion in _portions(tries):
                relayed = [one for one in portion if not one.facts.stored]
                payloads = [(one.key, one.body) for one in relayed]
                results.append(await self._decide(run_id, portion, payloads, seen_revision=seen_revision))
                self._recent.put((one.key, one.body) for one in relayed if one.is_now(ops.PushKind.QUEUED))
        except BaseException:
            # The portions before stay pushed, but nobody would come again for what they left blocked.
            if blocked := [one.key for one in tries if one.is_now(ops.PushKind.BLOCKED)]:
                with contextlib.suppress(RolloutBufferError):
                    await self._calls.call(abandon_push(run_id, blocked))
            raise
        return _joined(results)

    async def retry(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """Try blocked groups again."""
        # When a portion fails, what those before it left blocked keeps its place: the groups are of several pushes,
        # and each comes again for its own or gives it up.
        portions = _portions([_Try(facts, key) for facts, key in groups])
        return _joined([await self._decide(run_id, portion, (), retry=True) for portion in portions])

    async def _decide(
        self,
        run_id: str,
        portion: Sequence[_Try],
        payloads: Sequence[tuple[str, ops.Buffer]],
        *,
        retry: bool = False,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.PushResult:
        """Make one decision of the script, in several calls where much has to be dropped for it."""
        open_, goes_on = portion, False
        while True:
            groups = [(one.facts, one.key) for one in open_]
            push = push_portion(run_id, groups, payloads, retry=retry, goes_on=goes_on, seen_revision=seen_revision)
            revision, published, outcomes = await self._calls.call(push)
            for one, outcome in zip(open_, outcomes, strict=True):
                one.outcome = outcome
            open_ = [one for one in open_ if one.outcome is None]
            if not open_:
                return ops.PushResult(revision, [one.outcome for one in portion if one.outcome], published)
            payloads, retry, goes_on = (), True, True


def _portions(tries: Sequence[_Try]) -> Iterator[Sequence[_Try]]:
    """Portions of a push: at least one, which may be empty, since the store is asked in any case."""
    for first in range(0, max(1, len(tries)), ops.PORTION):
        yield tries[first : first + ops.PORTION]


def _joined(results: Sequence[ops.PushResult]) -> ops.PushResult:
    """Portions of one push, in order."""
    return replace(results[-1], outcomes=[pushed for result in results for pushed in result.outcomes])
