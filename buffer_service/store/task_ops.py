"""Operations on tasks and leases."""

from collections.abc import Sequence

from buffer_service.domain import ops
from buffer_service.store.base import StoreBase
from buffer_service.store.keys import new_payload_key
from buffer_service.store.replies import Fields, pack, text
from buffer_wire.revision import NO_REVISION, Revision

NO_HEAD = -1


class TaskOps(StoreBase):
    """Submit, lease, extend, give back."""

    async def submit(self, run_id: str, submit: ops.Submit, *, seen_revision: Revision = NO_REVISION) -> ops.Submitted:
        """See domain.ports.RunStore.submit."""
        tasks = [(task.task_id, task.priority, task.spec, task.environment) for task in submit.tasks]
        _, fields = await self._call(
            "submit",
            run_id,
            pack(
                seen_revision,
                submit.epoch,
                submit.request_id,
                submit.expected_cursor,
                submit.cursor,
                submit.feeder_state,
                tasks,
            ),
        )
        revision, cursor, pending, task_ids = fields
        return ops.Submitted(revision, cursor, [text(task_id) for task_id in task_ids], pending)

    async def lease(self, run_id: str, ask: ops.LeaseAsk, *, seen_revision: Revision = NO_REVISION) -> ops.Leased:
        """See domain.ports.RunStore.lease."""
        arguments = pack(
            seen_revision,
            ask.worker_id,
            ask.instance_id,
            ask.request_id,
            ask.engine_id,
            ask.loaded.epoch,
            ask.loaded.version,
            ask.max_tasks,
            ask.message_bytes,
        )
        tag, fields = "more", Fields()
        while tag == "more":
            tag, fields = await self._call("lease", run_id, arguments)
        revision, wait, required, ttl_ms, epoch, version, grants = fields
        continuations = await self._continuations([text(grant[4]) for grant in grants])
        return ops.Leased(
            revision=revision,
            grants=[
                _grant(text(task_id), generation, attempt, spec, continuation)
                for (task_id, generation, attempt, spec, _), continuation in zip(grants, continuations, strict=True)
            ],
            wait=ops.LeaseWait(text(wait)) if wait else None,
            published=ops.WeightVersion(epoch, version),
            required_version=required,
            ttl_ms=ttl_ms,
        )

    async def extend(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        lease_ids: Sequence[str],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Extended:
        """See domain.ports.RunStore.extend."""
        _, (revision, ttl_ms, states) = await self._call(
            "extend", run_id, pack(seen_revision, worker_id, instance_id, list(lease_ids))
        )
        return ops.Extended(revision, [ops.LeaseState(text(state)) for state in states], ttl_ms)

    async def give_back(
        self,
        run_id: str,
        worker_id: str,
        instance_id: str,
        returns: Sequence[ops.LeaseReturn],
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> ops.Returned:
        """See domain.ports.RunStore.give_back."""
        payloads, packed = [], []
        for given in returns:
            key = ""
            if given.continuation:
                key = new_payload_key(run_id, len(given.continuation))
                payloads.append((key, given.continuation))
            head = given.head or ops.WeightVersion(0, NO_HEAD)
            packed.append((given.lease_id, given.kind.value, given.error, key, head.epoch, head.version, given.tokens))
        arguments = pack(seen_revision, worker_id, instance_id, packed)
        _, (revision, outcomes) = await self._call_with_payloads("give_back", run_id, arguments, payloads)
        return ops.Returned(revision, [ops.ReturnOutcome(text(outcome)) for outcome in outcomes])

    async def _continuations(self, keys: Sequence[str]) -> list[bytes]:
        """Bodies by key, empty where there is none; one that is gone means that the attempt starts anew."""
        bodies = await self._connection.fetch([key for key in keys if key])
        found = iter(bodies)
        return [bytes(next(found) or b"") if key else b"" for key in keys]


def _grant(task_id: str, generation: int, attempt: int, spec: bytes, continuation: bytes) -> ops.LeaseGrant:
    return ops.LeaseGrant(f"{task_id}/{generation}/{attempt}", task_id, generation, attempt, spec, continuation)
