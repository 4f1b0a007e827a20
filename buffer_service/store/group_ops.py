"""Operations on groups: push, and payloads."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from buffer_service.domain import ops
from buffer_service.store.base import StoreBase
from buffer_service.store.keys import new_payload_key
from buffer_service.store.replies import Fields, pack, text
from buffer_wire.errors import RolloutBufferError

PORTION = 64
"""Most groups in one script, which holds the store up while it runs."""


class GroupOps(StoreBase):
    """Push, retry, abandon, fetch."""

    async def push(self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: int = 0) -> ops.PushResult:
        """See domain.ports.RunStore.push."""
        payloads = [(new_payload_key(run_id, len(group.body)), group.body) for group in groups]
        facts = [(group.facts, key) for group, (key, _) in zip(groups, payloads, strict=True)]

        async def push_portion(first: int) -> ops.PushResult:
            portion = facts[first : first + PORTION]
            arguments = pack(seen_revision, [_pack_group(*pair) for pair in portion], 0)
            stored = payloads[first : first + PORTION]
            result = _push_result(portion, (await self._call_with_payloads("push", run_id, arguments, stored))[1])
            self._recent.put(
                payload
                for payload, outcome in zip(stored, result.outcomes, strict=True)
                if outcome.kind is ops.PushKind.QUEUED
            )
            return result

        return await self._in_portions(run_id, len(facts), push_portion)

    async def retry_push(
        self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]], *, seen_revision: int = 0
    ) -> ops.PushResult:
        """See domain.ports.RunStore.retry_push."""

        async def retry_portion(first: int) -> ops.PushResult:
            portion = groups[first : first + PORTION]
            arguments = pack(seen_revision, [_pack_group(*pair) for pair in portion], 1)
            return _push_result(portion, (await self._call("push", run_id, arguments))[1])

        return await self._in_portions(run_id, len(groups), retry_portion)

    async def _in_portions(
        self, run_id: str, count: int, push: Callable[[int], Awaitable[ops.PushResult]]
    ) -> ops.PushResult:
        """Push portion after portion. When one fails, those before it stay pushed, and what they left blocked is given
        up: nobody would come again for it.
        """
        result = await push(0)
        for first in range(PORTION, count, PORTION):
            try:
                later = await push(first)
            except BaseException:
                if blocked := [pushed.payload_key for pushed in result.outcomes if pushed.payload_key]:
                    with contextlib.suppress(RolloutBufferError):
                        await self.abandon_push(run_id, blocked)
                raise
            result = replace(later, outcomes=[*result.outcomes, *later.outcomes])
        return result

    async def abandon_push(self, run_id: str, payload_keys: Sequence[str]) -> None:
        """See domain.ports.RunStore.abandon_push."""
        await self._call("abandon", run_id, pack(list(payload_keys)))

    async def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[ops.Buffer | None]:
        """See domain.ports.RunStore.fetch."""
        del run_id  # the keys say it
        found = self._recent.take(payload_keys)
        missing = [key for key, body in zip(payload_keys, found, strict=True) if body is None]
        if missing:
            stored = iter(await self._connection.fetch(missing))
            found = [next(stored) if body is None else body for body in found]
        return found


def _pack_group(facts: ops.GroupFacts, payload_key: str) -> tuple[object, ...]:
    return (
        facts.task_id,
        facts.generation,
        facts.lease_id,
        payload_key,
        facts.head.epoch,
        facts.head.version,
        facts.tail.epoch,
        facts.tail.version,
        facts.samples,
        facts.tokens,
        facts.loss_tokens,
        facts.size_bytes,
        int(facts.spans_versions),
        facts.environment,
        facts.mean_milli,
        int(facts.equal_rewards),
        facts.mean_reward_milli,
        facts.min_response_tokens,
        facts.max_response_tokens,
        facts.response_lengths,
        facts.rewards,
    )


def _push_result(groups: Sequence[tuple[ops.GroupFacts, str]], fields: Fields) -> ops.PushResult:
    revision, epoch, version, outcomes = fields
    pushed = []
    for (facts, key), outcome in zip(groups, outcomes, strict=True):
        group_id = f"{facts.task_id}/{facts.generation}"
        if isinstance(outcome, list):
            field, value, limit = (text(part) for part in outcome)
            pushed.append(ops.Pushed(ops.PushKind.INVALID, group_id, "", field, value, limit))
        else:
            kind = ops.PushKind(text(outcome))
            pushed.append(ops.Pushed(kind, group_id, key if kind is ops.PushKind.BLOCKED else ""))
    return ops.PushResult(revision, pushed, ops.WeightVersion(epoch, version))
