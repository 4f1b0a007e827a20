"""Looks into a run. Each is one script, which writes nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any

from buffer_service.domain import inspection as ins
from buffer_service.domain.ops import payload_size
from buffer_service.store.replies import pack, text
from buffer_service.store.run_ops import RunOps, as_policy
from buffer_wire.errors import InvalidField

HEAD_BYTES = 16 << 10
"""Of a blocked push, read to say whose it is."""


class InspectOps(RunOps):
    """Lists of tasks, groups and steps; waits."""

    async def list_tasks(
        self,
        run_id: str,
        which: ins.TaskSet,
        after: ins.Position,
        limit: int,
        *,
        environment: str | None,
        worker_id: str,
    ) -> ins.Page[ins.TaskFacts]:
        """See domain.inspection.InspectStore.list_tasks."""
        if which is ins.TaskSet.LEASED and after and not _is_cursor(after[0]):
            raise InvalidField("page_token", str(after[0])[:64], "the next_page_token of the page before")
        arguments = pack(which.value, limit, int(environment is not None), environment or "", worker_id, after)
        _, (revision, now, ttl_ms, tasks, following) = await self._call("inspect_tasks", run_id, arguments)
        return ins.Page(revision, now, [_task(task, ttl_ms) for task in tasks], _position(following))

    async def task(self, run_id: str, task_id: str) -> tuple[int, int, ins.TaskFacts]:
        """See domain.inspection.InspectStore.task."""
        _, (revision, now, ttl_ms, task) = await self._call("inspect_task", run_id, pack(task_id))
        return revision, now, _task(task, ttl_ms)

    async def list_groups(
        self, run_id: str, step: int | None, after: ins.Position, limit: int, *, environment: str | None
    ) -> tuple[ins.Place, ins.Page[ins.GroupView]]:
        """See domain.inspection.InspectStore.list_groups."""
        at = -1 if step is None else step
        arguments = pack(at, limit, int(environment is not None), environment or "", after)
        _, (revision, now, place, groups, following) = await self._call("inspect_groups", run_id, arguments)
        views = [ins.GroupView(*map(_plain, group)) for group in groups]
        return ins.Place(text(place)), ins.Page(revision, now, views, _position(following))

    async def list_steps(self, run_id: str, after: ins.Position, limit: int) -> ins.Page[ins.StepView]:
        """See domain.inspection.InspectStore.list_steps."""
        below = after[0] if after else -1
        _, (revision, now, steps, following) = await self._call("inspect_steps", run_id, pack(limit, below))
        views = [ins.StepView(step, ins.Place(text(place)), *facts) for step, place, *facts in steps]
        return ins.Page(revision, now, views, (following,) if following >= 0 else ())

    async def waits(self, run_id: str, limit: int) -> ins.Waits:
        """See domain.inspection.InspectStore.waits."""
        _, fields = await self._call("inspect_waits", run_id, pack(limit))
        revision, now, policy, blocked, pushes, leased, leases, workers, asked, clock, needed = fields
        heads = await asyncio.gather(*(self.read_payload(text(key), 0, HEAD_BYTES) for key, _, _ in pushes))
        effective = as_policy(policy)
        return ins.Waits(
            revision=revision,
            now_ms=now,
            policy=effective,
            blocked=blocked,
            pushes=[
                ins.BlockedPush(payload_size(text(key)), since, tried, head)
                for (key, since, tried), head in zip(pushes, heads, strict=True)
            ],
            leased=leased,
            expiring=[_task(lease, effective.lease_ttl_ms) for lease in leases],
            workers=workers,
            asked=[ins.WorkerView(text(name), text(instance), ms, held) for name, instance, ms, held in asked],
            clock=ins.AdmissionClock(*clock),
            needed_groups=needed,
        )

    async def read_payload(self, key: str, first: int, size: int) -> bytes:
        """See domain.inspection.InspectStore.read_payload."""
        return bytes(await self._connection.fetch_part(key, first, size))


def _is_cursor(part: int | str) -> bool:
    """Whether it is one of SCAN."""
    return isinstance(part, str) and part.isascii() and part.isdecimal() and len(part) <= 20 and int(part) < 1 << 64


def _plain(value: Any) -> Any:  # noqa: ANN401 - integers and strings of a reply
    return text(value) if isinstance(value, bytes) else value


def _position(following: Sequence[Any]) -> ins.Position:
    # Lua cannot tell an empty map from an empty array.
    return tuple(map(_plain, following))


def _task(fields: Sequence[Any], ttl_ms: int) -> ins.TaskFacts:
    values = [*map(_plain, fields), ttl_ms]
    for flag in (9, 10, 21):
        values[flag] = bool(values[flag])
    values[22] = ins.Place(values[22])
    return ins.TaskFacts(*values)
