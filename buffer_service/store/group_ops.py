"""Operations on groups: push, and payloads."""

from collections.abc import Sequence

from buffer_service.domain import ops
from buffer_service.store.base import StoreBase
from buffer_service.store.keys import new_payload_key
from buffer_service.store.replies import Fields, pack, text


class GroupOps(StoreBase):
    """Push, retry, abandon, fetch."""

    async def push(self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: int = 0) -> ops.PushResult:
        """See domain.ports.RunStore.push."""
        payloads = [(new_payload_key(run_id, len(group.body)), group.body) for group in groups]
        facts = [(group.facts, key) for group, (key, _) in zip(groups, payloads, strict=True)]
        arguments = pack(seen_revision, [_pack_group(*pair) for pair in facts], 0)
        _, fields = await self._call_with_payloads("push", run_id, arguments, payloads)
        result = _push_result(facts, fields)
        self._recent.put(
            payload
            for payload, outcome in zip(payloads, result.outcomes, strict=True)
            if outcome.kind is ops.PushKind.QUEUED
        )
        return result

    async def retry_push(
        self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]], *, seen_revision: int = 0
    ) -> ops.PushResult:
        """See domain.ports.RunStore.retry_push."""
        arguments = pack(seen_revision, [_pack_group(*pair) for pair in groups], 1)
        _, fields = await self._call("push", run_id, arguments)
        return _push_result(groups, fields)

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
