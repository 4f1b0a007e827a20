"""RedisRunStore: domain.ports.RunStore on Redis or Valkey."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar, cast

from buffer_service.commands import inspection, runs, tasks, view
from buffer_service.commands.replies import text
from buffer_service.domain import inspection as ins
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.policy import RunPolicy
from buffer_service.store.address import is_cluster
from buffer_service.store.calls import Calls
from buffer_service.store.cluster.index import ClusterIndex
from buffer_service.store.housekeeping import Housekeeping
from buffer_service.store.keys import index_key, new_secret
from buffer_service.store.notifications import StoreNotifications
from buffer_service.store.payloads.audit import Audit
from buffer_service.store.payloads.cluster import ClusterPayloads
from buffer_service.store.payloads.shards import Shards
from buffer_service.store.payloads.tier import PayloadTier, WithIndex
from buffer_service.store.pushing import Pushing
from buffer_service.store.recent import RecentPayloads
from buffer_service.store.suitability import check_layout, check_suitable
from buffer_service.store.transport.connection import StoreConnection
from buffer_service.store.transport.index import Index
from buffer_service.store.transport.meter import CallMeter, NoMeter
from buffer_service.store.users import PayloadUsers
from buffer_wire.errors import InvalidField, RunExists, StoreUnavailable, StoreUnsuitable, UnknownRun
from buffer_wire.revision import NO_REVISION, Revision

T = TypeVar("T")

HEAD_BYTES = 16 << 10
"""Bytes of a blocked push that are read to say whose it is."""

_EVENT_ID = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


class RedisRunStore:
    """Runs, tasks, groups, batches and weights on one store; see domain.ports.RunStore for each method.

    Use `connect`; `close` ends its tasks and connections. Every decision is one script on the store (lua/), so any
    number of replicas may work on the same run.
    """

    def __init__(self, connection: Index, shards: Shards | None, recent: RecentPayloads, meter: CallMeter) -> None:
        self._one = connection if isinstance(connection, StoreConnection) else None
        """Connection to the one server that decides; None where runs are spread over `shards`."""
        tier: PayloadTier
        if shards is not None:
            tier = ClusterPayloads(connection, shards, meter)
        else:
            assert self._one is not None  # noqa: S101 - there is one of the two
            tier = WithIndex(self._one)
        self.notifications = StoreNotifications(connection)
        self._connection = connection
        self._shards = shards
        self._tier = tier
        self._recent = recent
        self._calls = Calls(connection, tier)
        self._pushing = Pushing(self._calls, recent, self.notifications)
        self._users = PayloadUsers(connection, shards.every_node if shards else None)
        audit = Audit(connection, self._calls, shards, tier) if shards else None
        self._housekeeping = Housekeeping(connection, self._calls, self._users, audit)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        store: str,
        *,
        ca: Path | None = None,
        embedded: bool = False,
        timeout_s: float = 30.0,
        recent_bytes: int = 0,
        meter: CallMeter | None = None,
        payload_store: str = "",
    ) -> Self:
        """Connect to an address (store/address.py), with TLS by the authorities in `ca` or the system's. Payloads that
        were just pushed here are kept for pulls, up to `recent_bytes`. `meter` is told of every call. `embedded`: the
        service's own, which it has refuse writes where its disk has no room (supervisor/disk.py). `payload_store`:
        address of the cluster that payloads lie on; empty: they lie beside the index.

        A `store` that is a cluster has its payloads on all of its shards, and each run in a slot of its own.

        Raises StoreUnavailable, StoreUnsuitable.
        """
        if is_cluster(store):
            return await cls._connect_cluster(store, payload_store, ca, timeout_s, recent_bytes, meter)
        shards = Shards(payload_store, ca=ca, timeout_s=timeout_s) if payload_store else None
        connection = StoreConnection(
            store, ca=ca, embedded=embedded, timeout_s=timeout_s, meter=meter, apart=shards is not None
        )
        self = cls(connection, shards, RecentPayloads(recent_bytes), meter or NoMeter())
        try:
            await check_suitable(connection, apart=shards is not None)
            await connection.open()
            if shards is not None:
                await shards.open()
        except BaseException:
            await self.close()
            raise
        self._begin()
        return self

    @classmethod
    async def _connect_cluster(
        cls,
        store: str,
        payload_store: str,
        ca: Path | None,
        timeout_s: float,
        recent_bytes: int,
        meter: CallMeter | None,
    ) -> Self:
        shards = Shards(store, ca=ca, timeout_s=timeout_s, decides=True)
        if payload_store:
            raise StoreUnsuitable(
                shards.address.shown, "it is a cluster, so payloads lie there: leave out --payload-store"
            )
        index = ClusterIndex(shards, timeout_s=timeout_s, meter=meter)
        self = cls(index, shards, RecentPayloads(recent_bytes), meter or NoMeter())
        try:
            await shards.open()
            await index.check()
        except BaseException:
            await self.close()
            raise
        self._begin()
        return self

    def _begin(self) -> None:
        """Begin to listen, and to look where the servers are."""
        loops = {"notifications": self.notifications.listen()}
        if self._one is not None:
            loops["primary"] = self._one.primary.watch()
        if self._shards is not None:
            loops["shards"] = self._shards.watch()
        self._tasks = [asyncio.create_task(loop, name=f"store-{name}") for name, loop in loops.items()]

    async def check_layout(self) -> None:
        """Raises LayoutChanged once a service of another version has taken the store over; StoreUnavailable."""
        await check_layout(self._connection, apart=self._has_place)

    @property
    def _has_place(self) -> bool:
        """True where payloads lie on servers that are not the index's, which the index notes."""
        return self._shards is not None and self._one is not None

    async def close(self) -> None:
        """Close connections."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._connection.close()
        if self._shards is not None:
            await self._shards.close()

    async def call(self, command: Command[T]) -> T:
        """Carry out a command."""
        done = await self._calls.call(command)
        if self._shards is not None and isinstance(done, ops.RunView):
            # What decides does not know where payloads lie.
            return cast("T", replace(done, payload_shards=len(self._shards.nodes())))
        return done

    async def create_run(
        self, run_id: str, policy: RunPolicy, *, revision: int = 1, secret: str = ""
    ) -> tuple[ops.RunView, bool]:
        """Create a run, or find it."""
        # The script sees the layout of the run alone, which is ours.
        await check_layout(self._connection, apart=self._has_place)
        await self._connection.command("SADD", self._connection.names.runs, run_id)
        created, differs = await self.call(runs.create_run(run_id, policy, revision, secret or new_secret()))
        # A sweep may have taken a run of that name off the list before this one was there.
        await self._connection.command("SADD", self._connection.names.runs, run_id)
        self._calls.note(run_id)
        if differs:
            raise RunExists(run_id, ",".join(differs))
        return await self.call(view(run_id)), created

    async def list_runs(self) -> Sequence[str]:
        """Ids of all runs, sorted."""
        return await self._housekeeping.list_runs()

    async def delete_run(self, run_id: str) -> None:
        """Delete a run with all its keys."""
        await self._housekeeping.delete_run(run_id)

    async def sweep(self) -> int:
        """Tidy up every run."""
        return await self._housekeeping.sweep()

    async def lease(self, run_id: str, ask: ops.LeaseAsk, *, seen_revision: Revision = NO_REVISION) -> ops.Leased:
        """Lease tasks with their partial rollouts; of one that is gone the attempt starts anew."""
        leased, keys = await self.call(tasks.lease(run_id, ask, seen_revision=seen_revision))
        if not any(keys):
            return leased
        found = iter(await self._tier.get([key for key in keys if key]))
        bodies = [bytes(next(found) or b"") if key else b"" for key in keys]
        grants = [replace(grant, partial_rollout=body) for grant, body in zip(leased.grants, bodies, strict=True)]
        return replace(leased, grants=grants)

    async def push(
        self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        """Store payloads and index them."""
        return await self._pushing.push(run_id, groups, seen_revision)

    async def retry_push(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """Try blocked groups again."""
        return await self._pushing.retry(run_id, groups)

    async def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[ops.Buffer | None]:
        """Stored bodies, None where one is gone."""
        del run_id  # the keys say it
        found = self._recent.take(payload_keys)
        missing = [key for key, body in zip(payload_keys, found, strict=True) if body is None]
        if missing:
            stored = iter(await self._tier.get(missing))
            found = [next(stored) if body is None else body for body in found]
        return found

    async def read_payload(self, key: str, first: int, size: int) -> bytes:
        """A part of a stored body."""
        return bytes(await self._tier.part(key, first, size))

    async def write_part(self, part_key: str, body: ops.Buffer) -> bool:
        """Write a part of a payload that a push is to name."""
        return await self._tier.write_part(part_key, body)

    async def read_part(self, part_key: str) -> ops.Buffer | None:
        """A part of a payload."""
        return await self._tier.read_part(part_key)

    async def payload_place(self, *, anew: bool = False) -> ops.StorePlace:
        """Place of the payloads: where the service reaches them at present."""
        if self._shards is not None:
            return await self._shards.place(anew=anew)
        assert self._one is not None  # noqa: S101 - there is one of the two
        return self._one.primary.place()

    async def payload_user(self, run_id: str, direction: ops.Direction, noted: ops.NotedClient) -> ops.StoreUser:
        """A user of the store for the payloads of a run."""
        return await self._users.make(run_id, direction, noted.secret, noted.now_ms)

    async def waits(self, run_id: str, limit: int) -> ins.Waits:
        """Waits of the run: who waits on whom."""
        found, keys = await self.call(inspection.waits(run_id, limit))
        heads = await asyncio.gather(*map(self._head, keys))
        pushes = [replace(push, head=head) for push, head in zip(found.pushes, heads, strict=True)]
        return replace(found, pushes=pushes)

    async def _head(self, key: str) -> bytes:
        try:
            return await self.read_payload(key, 0, HEAD_BYTES)
        except StoreUnavailable:
            # Whoever asks who waits on whom may ask because a server is away.
            return b""

    async def records(self, run_id: str, after: str, limit: int) -> Sequence[ops.Record]:
        """Events of the run's recording. Raises InvalidField for what is no event id."""
        if after and not _EVENT_ID.fullmatch(after):
            raise InvalidField("after", after, "an event id, or empty")
        if limit < 1:
            raise InvalidField("limit", limit, "at least 1")
        first = f"({after}" if after else "-"
        events = await self._connection.command("XRANGE", index_key(run_id, "record"), first, "+", "COUNT", limit)
        if not await self._connection.command("EXISTS", index_key(run_id, "run")):
            raise UnknownRun(run_id)
        return [ops.Record(text(event_id), text(kind), bytes(data)) for event_id, (_, kind, _, data) in events]

    async def facts(self) -> ops.StoreFacts:
        """Facts that the store's server gives of itself."""
        infos = await self._connection.infos()
        limits = [int(info.get("maxmemory", "0")) for info in infos]
        shards = await self._shards.facts() if self._shards is not None else ()
        return ops.StoreFacts(
            sum(int(info["used_memory"]) for info in infos),
            sum(limits) if all(limits) else 0,
            sum(int(info["connected_clients"]) for info in infos),
            shards,
        )
