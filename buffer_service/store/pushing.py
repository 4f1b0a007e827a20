"""Pushes: groups and their payloads, in portions that do not hold up the store."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from buffer_service.commands import abandon_push, groups
from buffer_service.commands.payload_keys import new_payload_key
from buffer_service.domain import ops
from buffer_service.store.calls import Calls
from buffer_service.store.recent import RecentPayloads
from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import NO_REVISION, Revision


class Pushing:
    """Push, and retry. What was queued is kept in memory for the pull that wants it."""

    def __init__(self, calls: Calls, recent: RecentPayloads) -> None:
        self._calls = calls
        self._recent = recent

    async def push(self, run_id: str, new: Sequence[ops.NewGroup], seen_revision: Revision) -> ops.PushResult:
        """See domain.ports.RunStore.push."""
        payloads = [(new_payload_key(run_id, len(group.body)), group.body) for group in new]
        facts = [(group.facts, key) for group, (key, _) in zip(new, payloads, strict=True)]

        results: list[ops.PushResult] = []
        try:
            for first in range(0, max(1, len(facts)), ops.PORTION):
                portion, stored = facts[first : first + ops.PORTION], payloads[first : first + ops.PORTION]
                result = await self._push_portion(run_id, portion, stored, retry=False, seen_revision=seen_revision)
                self._recent.put(
                    payload
                    for payload, outcome in zip(stored, result.outcomes, strict=True)
                    if outcome.kind is ops.PushKind.QUEUED
                )
                results.append(result)
        except BaseException:
            # The portions before stay pushed, but nobody would come again for what they left blocked.
            outcomes = [pushed for result in results for pushed in result.outcomes]
            if blocked := [pushed.payload_key for pushed in outcomes if pushed.payload_key]:
                with contextlib.suppress(RolloutBufferError):
                    await self._calls.call(abandon_push(run_id, blocked))
            raise
        return _joined(results)

    async def retry(self, run_id: str, blocked: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """See domain.ports.RunStore.retry_push."""
        # When a portion fails, what those before it left blocked keeps its place: the groups are of several pushes,
        # and each comes again for its own or gives it up.
        return _joined(
            [
                await self._push_portion(run_id, blocked[first : first + ops.PORTION], (), retry=True)
                for first in range(0, max(1, len(blocked)), ops.PORTION)
            ]
        )

    async def _push_portion(
        self,
        run_id: str,
        portion: Sequence[tuple[ops.GroupFacts, str]],
        payloads: Sequence[tuple[str, ops.Buffer]],
        *,
        retry: bool,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.PushResult:
        """One decision of the script, in several calls where much has to be dropped for it."""
        push = groups.push_portion(run_id, portion, payloads, retry=retry, seen_revision=seen_revision)
        revision, published, outcomes = await self._calls.call(push)
        while left := [i for i, outcome in enumerate(outcomes) if outcome == groups.MORE]:
            rest = [portion[i] for i in left]
            push = groups.push_portion(run_id, rest, retry=True, goes_on=True, seen_revision=seen_revision)
            revision, published, again = await self._calls.call(push)
            for i, outcome in zip(left, again, strict=True):
                outcomes[i] = outcome
        pushed = [groups.pushed(*group, outcome) for group, outcome in zip(portion, outcomes, strict=True)]
        return ops.PushResult(revision, pushed, published)


def _joined(results: Sequence[ops.PushResult]) -> ops.PushResult:
    """Portions of one push, in order."""
    return replace(results[-1], outcomes=[pushed for result in results for pushed in result.outcomes])
