"""Operations on groups: push, and payloads."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from buffer_service.domain import ops
from buffer_service.domain.window import length_buckets
from buffer_service.store.base import StoreBase
from buffer_service.store.keys import new_payload_key
from buffer_service.store.replies import Fields, pack, text
from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import NO_REVISION, Revision


class GroupOps(StoreBase):
    """Push, retry, abandon, fetch."""

    async def push(
        self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        """See domain.ports.RunStore.push."""
        payloads = [(new_payload_key(run_id, len(group.body)), group.body) for group in groups]
        facts = [(group.facts, key) for group, (key, _) in zip(groups, payloads, strict=True)]

        results: list[ops.PushResult] = []
        try:
            for first in range(0, max(1, len(facts)), ops.PORTION):
                portion, stored = facts[first : first + ops.PORTION], payloads[first : first + ops.PORTION]
                result = await self._push_portion(run_id, portion, stored, 0, seen_revision)
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
                    await self.abandon_push(run_id, blocked)
            raise
        return _joined(results)

    async def retry_push(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """See domain.ports.RunStore.retry_push."""
        # When a portion fails, what those before it left blocked keeps its place: the groups are of several pushes,
        # and each comes again for its own or gives it up.
        return _joined(
            [
                await self._push_portion(run_id, groups[first : first + ops.PORTION], (), 1, NO_REVISION)
                for first in range(0, max(1, len(groups)), ops.PORTION)
            ]
        )

    async def _push_portion(
        self,
        run_id: str,
        portion: Sequence[tuple[ops.GroupFacts, str]],
        payloads: Sequence[tuple[str, ops.Buffer]],
        retry: int,
        seen_revision: Revision,
    ) -> ops.PushResult:
        """One decision of the script, in several calls where much has to be dropped for it."""
        packed = [_pack_group(*pair) for pair in portion]
        arguments = pack(seen_revision, packed, retry, 0)
        _, fields = await self._call_with_payloads("push", run_id, arguments, payloads)
        outcomes = fields[-1]
        while left := [i for i, outcome in enumerate(outcomes) if outcome == b"more"]:
            _, fields = await self._call("push", run_id, pack(seen_revision, [packed[i] for i in left], 1, 1))
            for i, outcome in zip(left, fields[-1], strict=True):
                outcomes[i] = outcome
        return _push_result(portion, [*fields[:-1], outcomes])

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
        facts.response_tokens,
        facts.reward_milli,
        facts.turns,
        facts.truncated_samples,
        [number for entry in length_buckets(facts.response_lengths).items() for number in entry],
        [number for made, tokens in facts.version_tokens for number in (made.epoch, made.version, tokens)],
        facts.first_revision,
    )


def _push_result(groups: Sequence[tuple[ops.GroupFacts, str]], fields: Fields) -> ops.PushResult:
    revision, epoch, version, outcomes = fields
    pushed = []
    for (facts, key), outcome in zip(groups, outcomes, strict=True):
        group_id = f"{facts.task_id}/{facts.generation}"
        if isinstance(outcome, list):
            field, value, limit = (text(part) for part in outcome)
            kind = ops.PushKind.FORGOTTEN if field == "first_revision" else ops.PushKind.INVALID
            pushed.append(ops.Pushed(kind, group_id, "", field, value, limit))
        else:
            kind = ops.PushKind(text(outcome))
            pushed.append(ops.Pushed(kind, group_id, key if kind is ops.PushKind.BLOCKED else ""))
    return ops.PushResult(revision, pushed, ops.WeightVersion(epoch, version))


def _joined(results: Sequence[ops.PushResult]) -> ops.PushResult:
    """Portions of one push, in order."""
    return replace(results[-1], outcomes=[pushed for result in results for pushed in result.outcomes])
