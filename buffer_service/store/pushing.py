"""Pushes: groups and their payloads, in portions that do not hold up the store.

What several push to a run at the same time goes to the store in one call. A refusal of such a call is not yet that of
each push in it: they are tried again one by one, and each has its own answer. Payloads on servers of their own are
stored first, for each push by itself: nobody waits for the shards of others.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buffer_service.commands import abandon_push
from buffer_service.commands.groups import payloads_of_push, push_portion
from buffer_service.domain import ops
from buffer_service.store.calls import Calls
from buffer_service.store.notifications import StoreNotifications
from buffer_service.store.recent import RecentPayloads
from buffer_service.store.transport.joined_calls import JoinedCalls
from buffer_wire.errors import (
    LayoutChanged,
    RolloutBufferError,
    RunPaused,
    StoreOutOfMemory,
    StoreRolledBack,
    UnknownRun,
    UnprovenRevision,
)
from buffer_wire.payloads.keys import new_nonce, payload_key, with_new_nonce
from buffer_wire.revision import NO_REVISION, Revision

JOINED_BYTES = 4 << 20
"""Largest number of bytes of payloads in a call that several pushes share."""

_NOTHING_RAN = (LayoutChanged, RunPaused, StoreOutOfMemory, StoreRolledBack, UnknownRun, UnprovenRevision)
"""Refusals by which no group of the call was accepted, nor is kept."""


@dataclass(slots=True)
class _Try:
    """A group of a push, from its facts to its outcome."""

    facts: ops.GroupFacts
    key: str
    body: ops.Buffer = b""
    outcome: ops.Pushed | None = None

    def is_now(self, kind: ops.PushKind) -> bool:
        return self.outcome is not None and self.outcome.kind is kind


@dataclass(slots=True)
class _Portion:
    """A portion of a push, from its tries to what became of it."""

    tries: Sequence[_Try]
    seen: Revision
    there: bytes | None = None
    """See Command.there."""
    result: ops.PushResult | None = None
    failure: RolloutBufferError | None = None

    @property
    def count(self) -> int:
        return len(self.tries)

    @property
    def size_bytes(self) -> int:
        return sum([len(one.body) for one in self.tries])

    def payloads(self) -> list[tuple[str, ops.Buffer]]:
        """Keys and bodies that are not in the store yet."""
        return [(one.key, one.body) for one in self.tries if not one.facts.stored]


class Pushing:
    """Push, and retry. What was queued is kept in memory for the pull that wants it."""

    def __init__(self, calls: Calls, recent: RecentPayloads, notifications: StoreNotifications) -> None:
        self._calls = calls
        self._recent = recent
        self._notifications = notifications
        self._joined = JoinedCalls(self._push_portions, most_count=ops.PORTION, most_bytes=JOINED_BYTES)

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
            for its in _portions(tries):
                portion = _Portion(its, seen_revision)
                await self._store(run_id, portion)
                await self._joined.join(run_id, portion)
                results.append(_result(portion))
                self._recent.put(
                    (one.key, one.body)
                    for one in its
                    if not one.facts.stored and (one.is_now(ops.PushKind.QUEUED) or one.is_now(ops.PushKind.ADDED))
                )
        except BaseException:
            # The portions before stay pushed, but nobody would come again for what they left blocked.
            if blocked := [one.key for one in tries if one.is_now(ops.PushKind.BLOCKED)]:
                with contextlib.suppress(RolloutBufferError):
                    await self._calls.call(abandon_push(run_id, blocked))
            raise
        return _joined(results)

    async def _store(self, run_id: str, portion: _Portion) -> None:
        if self._calls.stores_first and portion.tries:
            groups = [(one.facts, one.key) for one in portion.tries]
            portion.there = await self._calls.store(payloads_of_push(run_id, groups, portion.payloads()))

    async def _push_portions(self, run_id: str, portions: Sequence[_Portion]) -> None:
        """Push portions of several pushes in one call. Each has its result or its failure then."""
        tries = [one for portion in portions for one in portion.tries]
        payloads = [each for portion in portions for each in portion.payloads()]
        there = b"".join([portion.there or b"" for portion in portions]) if self._calls.stores_first else None
        # Of all that was seen. Who names a revision that nobody gave out is refused alone, below.
        seen = max(portion.seen for portion in portions)
        # Who is woken now is at the store right behind what is sent next.
        self._notifications.leaving(run_id, len(tries))
        try:
            result = await self._decide(run_id, tries, payloads, there=there, seen_revision=seen)
        except _NOTHING_RAN:
            if len(portions) == 1 or any(one.outcome for one in tries):
                raise
            await asyncio.gather(*(self._push_alone(run_id, portion) for portion in portions))
            return
        for portion in portions:
            portion.result = ops.PushResult(result.revision, _outcomes(portion.tries), result.published)

    async def _push_alone(self, run_id: str, portion: _Portion) -> None:
        # The script has given up what lay under these.
        for one in portion.tries:
            if not one.facts.stored:
                one.key = with_new_nonce(one.key)
        try:
            await self._store(run_id, portion)
            await self._push_portions(run_id, [portion])
        except RolloutBufferError as error:
            portion.failure = error

    async def retry(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """Try blocked groups again."""
        # When a portion fails, what those before it left blocked keeps its place: the groups are of several pushes,
        # and each comes again for its own or gives it up.
        portions = _portions([_Try(facts, key) for facts, key in groups])
        return _joined([await self._decide(run_id, portion, retry=True) for portion in portions])

    async def _decide(
        self,
        run_id: str,
        tries: Sequence[_Try],
        payloads: Sequence[tuple[str, ops.Buffer]] = (),
        *,
        there: bytes | None = None,
        retry: bool = False,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.PushResult:
        """Make one decision of the script, in several calls where much has to be dropped for it."""
        open_, goes_on = tries, False
        while True:
            groups = [(one.facts, one.key) for one in open_]
            push = push_portion(
                run_id, groups, payloads, retry=retry, goes_on=goes_on, there=there, seen_revision=seen_revision
            )
            revision, published, outcomes = await self._calls.call(push)
            for one, outcome in zip(open_, outcomes, strict=True):
                one.outcome = outcome
            open_ = [one for one in open_ if one.outcome is None]
            if not open_:
                return ops.PushResult(revision, _outcomes(tries), published)
            payloads, there, retry, goes_on = (), None, True, True


def _portions(tries: Sequence[_Try]) -> Iterator[Sequence[_Try]]:
    """Portions of a push: at least one, which may be empty, since the store is asked in any case."""
    for first in range(0, max(1, len(tries)), ops.PORTION):
        yield tries[first : first + ops.PORTION]


def _outcomes(tries: Sequence[_Try]) -> list[ops.Pushed]:
    return [one.outcome for one in tries if one.outcome]


def _result(portion: _Portion) -> ops.PushResult:
    """Result of a portion. Raises its failure."""
    if portion.failure is not None:
        raise portion.failure
    if portion.result is None:
        raise RuntimeError("the portion was not pushed")
    return portion.result


def _joined(results: Sequence[ops.PushResult]) -> ops.PushResult:
    """Portions of one push, in order."""
    return replace(results[-1], outcomes=[pushed for result in results for pushed in result.outcomes])
