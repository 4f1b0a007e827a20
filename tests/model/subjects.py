"""Subjects that the machine drives beside the model: a store, or another model.

A subject runs one operation to its end, synchronously, at the time that the machine has set.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol, cast

import uvloop

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ops import PORTION
from buffer_service.domain.ports import Topic
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.keys import part_count, part_keys, payload_key
from tests.oracle import ReferenceModel
from tests.store.driver import sent
from tests.support.store_cluster import StoreCluster

PORTIONS = PORTION, 1
"""Groups that one call of a pull takes, by replica: with few of them every micro-batch is gathered."""


_PART = re.compile(rb"(:\d+)\.\d+$")
"""End of a part's key; the payload's has what is in the brackets alone."""

WRITERS = frozenset({"write", "expire_written"})
"""Operations of pushers on the store itself, and of time there."""


class _Marker(StrEnum):
    """A topic of its own: when it is heard, everything before it was."""

    HERE = "here"


class Subject(Protocol):
    """One implementation of RunStore's operations."""

    def call(
        self, operation: str, run_id: str, args: Sequence[Any], kwargs: dict[str, Any], replica: int
    ) -> tuple[Any, Any]:
        """Run an operation; its reply or refusal, and the view of the run, or its refusal, afterwards."""
        ...

    def view(self, run_id: str) -> Any:
        """The view of a run, or its refusal."""
        ...

    def set_time(self, run_id: str, now_ms: int) -> None:
        """The run's time from now on."""
        ...

    def sweep(self, run_id: str) -> None:
        """Expire leases and delete what nothing refers to."""
        ...

    def stored_bodies(self, run_id: str) -> int:
        """Payloads and partial rollouts that exist."""
        ...

    def leftovers(self, run_id: str) -> list[str]:
        """Return what is kept of a run that does not exist."""
        ...

    def forget(self) -> None:
        """Delete all runs."""
        ...


class StoreSubject:
    """The real store, reached at an address by several replicas. `close` it."""

    written_with: tuple[str, ...] = ("NX",)

    def __init__(self, url: str, cluster: StoreCluster | None = None) -> None:
        """`cluster`: what payloads lie on, beside the index at `url`; without `url` runs lie there too."""
        self._loop = uvloop.new_event_loop()  # As rpc processes have it.
        self._cluster = cluster
        payload_store = cluster.url if cluster is not None else ""
        if not url:
            url, payload_store = payload_store, ""
        self.replicas = [
            self._loop.run_until_complete(RedisRunStore.connect(url, payload_store=payload_store)) for _ in PORTIONS
        ]

    def call(
        self, operation: str, run_id: str, args: Sequence[Any], kwargs: dict[str, Any], replica: int
    ) -> tuple[Any, Any]:
        return self._loop.run_until_complete(self._call(operation, run_id, args, kwargs, replica))

    def view(self, run_id: str) -> Any:
        return self._loop.run_until_complete(_attempt(self.replicas[0].call(commands.view(run_id))))

    def set_time(self, run_id: str, now_ms: int) -> None:
        self._command("SET", index_key(run_id, "test_now"), now_ms)

    def sweep(self, run_id: str) -> None:
        self._loop.run_until_complete(self.replicas[0].sweep())

    def stored_bodies(self, run_id: str) -> int:
        keys = map(bytes, self._command("KEYS", f"rb:p:{run_id}:*"))
        return len({_PART.sub(rb"\1", key) for key in keys})

    def leftovers(self, run_id: str) -> list[str]:
        payloads = self._loop.run_until_complete(self._payload_keys(run_id, expiring=False))
        found = [*payloads, *self._command("KEYS", index_key(run_id, "*"))]
        return sorted({bytes(key).decode() for key in found} - {index_key(run_id, "test_now")})

    def tickets(self, run_id: str) -> dict[Topic, int]:
        """Count how many hints of each topic there were, including those of every operation before this call."""
        return self._loop.run_until_complete(self._tickets(run_id))

    def forget(self) -> None:
        self._command("FLUSHALL")
        if self._cluster is not None:
            self._cluster.flush()

    def close(self) -> None:
        for store in self.replicas:
            self._loop.run_until_complete(store.close())
        self._loop.close()

    async def _call(
        self, operation: str, run_id: str, args: Sequence[Any], kwargs: dict[str, Any], replica: int
    ) -> tuple[Any, Any]:
        store = self.replicas[replica]
        if operation in WRITERS:
            reply = await getattr(self, f"_{operation}")(run_id, *args)
            return reply, await _attempt(store.call(commands.view(run_id)))
        if operation == "push":
            args = ([_in_parts(group) for group in args[0]], *args[1:])
        if operation == "delete_run" and self._cluster is not None:
            await self._let_expire(run_id)
        if operation == "pull":
            kwargs = {"portion": PORTIONS[replica], **kwargs}
        if hasattr(commands, operation):
            reply = await _attempt(_call(store, operation, run_id, *args, **kwargs))
        else:
            reply = await _attempt(getattr(store, operation)(run_id, *args, **kwargs))
        # Another replica's view: whatever one keeps in memory must not matter.
        return reply, await _attempt(self.replicas[replica - 1].call(commands.view(run_id)))

    async def _write(self, run_id: str, written: ops.NewGroup) -> None:
        # A key that waits for its deletion would be written in vain.
        await self.replicas[0]._calls.delete_trash(run_id)
        size = written.facts.size_bytes
        key = payload_key(run_id, written.nonce, written.checksum, size, part_count(size))
        left = written.body
        for part in part_keys(key):
            await self._send("SET", part.key, left[: part.size], *self.written_with, "PX", ops.UNPUSHED_MS)
            left = left[part.size :]

    async def _expire_written(self, run_id: str) -> None:
        if expiring := await self._payload_keys(run_id, expiring=True):
            await self._send("UNLINK", *expiring)
        # What met a full queue, or a run that was paused, is staged on a cluster in place of an expiry.
        if self._cluster is not None and (staged := await self._staged(run_id)):
            await self._send("ZREM", index_key(run_id, "staging"), *staged)
            await self._send("UNLINK", *staged)

    async def _let_expire(self, run_id: str) -> None:
        """Have what met a full queue expire, which a deletion of the run would take at once."""
        for key in await self._staged(run_id):
            await self._send("ZREM", index_key(run_id, "staging"), key)
            await self._send("PEXPIRE", key, ops.UNPUSHED_MS)

    async def _staged(self, run_id: str) -> set[bytes]:
        """Keys that are staged and do not wait for room."""
        staged, waiting = [
            set(map(bytes, await self._send("ZRANGE", index_key(run_id, name), 0, -1)))
            for name in ("staging", "waiting")
        ]
        return staged - waiting

    async def _payload_keys(self, run_id: str, *, expiring: bool) -> list[bytes]:
        keys = map(bytes, await self._send("KEYS", f"rb:p:{run_id}:*"))
        return [key for key in keys if (await self._send("PTTL", key) >= 0) == expiring]

    async def _tickets(self, run_id: str) -> dict[Topic, int]:
        notifications = self.replicas[0].notifications
        seen = notifications.ticket(run_id, cast("Topic", _Marker.HERE))
        await self.replicas[0]._connection.command("PUBLISH", index_key(run_id, "notify"), _Marker.HERE.value)
        assert await notifications.wait(run_id, cast("Topic", _Marker.HERE), seen, 10) > seen
        return {topic: notifications.ticket(run_id, topic) for topic in Topic}

    def _command(self, *words: str | int) -> Any:
        return self._loop.run_until_complete(self._send(*words))

    async def _send(self, *words: Any) -> Any:
        return await sent(self.replicas[0], *words)


class ModelSubject:
    """A model in the place of the store, to try the machine itself."""

    def __init__(self, model: type[ReferenceModel] = ReferenceModel) -> None:
        self._now = 0
        self._kind = model
        self._model = model(lambda: self._now)

    def call(
        self, operation: str, run_id: str, args: Sequence[Any], kwargs: dict[str, Any], replica: int
    ) -> tuple[Any, Any]:
        try:
            reply = getattr(self._model, operation)(run_id, *args, **kwargs)
        except RolloutBufferError as refusal:
            reply = refusal
        return reply, self.view(run_id)

    def view(self, run_id: str) -> Any:
        try:
            return self._model.view(run_id)
        except RolloutBufferError as refusal:
            return refusal

    def set_time(self, run_id: str, now_ms: int) -> None:
        self._now = now_ms

    def sweep(self, run_id: str) -> None:
        if run_id in self._model.list_runs():
            self._model.expire(run_id)

    def stored_bodies(self, run_id: str) -> int:
        return self._model.stored_bodies(run_id)

    def leftovers(self, run_id: str) -> list[str]:
        return [one for one in self._model.list_runs() if one == run_id]

    def forget(self) -> None:
        self._model = self._kind(lambda: self._now)


def _in_parts(group: ops.NewGroup) -> ops.NewGroup:
    """The group as the service has it: in parts where it is large. A body that is relayed may be any here."""
    size = group.facts.size_bytes
    is_whole = group.facts.stored or len(group.body) == size
    return replace(group, parts=part_count(size)) if is_whole else group


async def _call(store: RedisRunStore, operation: str, *args: Any, **kwargs: Any) -> Any:
    return await store.call(getattr(commands, operation)(*args, **kwargs))


async def _attempt(operation: Any) -> Any:
    try:
        return _of_any_place(await operation)
    except RolloutBufferError as refusal:
        return refusal


def _of_any_place(reply: Any) -> Any:
    """The reply without where payloads lie, which the model does not know."""
    match reply:
        case ops.RunView():
            return replace(reply, payload_shards=0)
        case (ops.RunView() as view, created):
            return _of_any_place(view), created
        case _:
            return reply
