"""Housekeeping in the background, and the deletion of runs.

A deletion goes on in portions, by whoever calls. The run is under another name from the first moment on, so no client
finds it. It stays in the set of runs until nothing is left of it, so every sweep finds it and goes on.
"""

import asyncio
from collections.abc import Sequence

from buffer_service.commands import runs
from buffer_service.commands.replies import text
from buffer_service.domain.ops.groups import STAGING_AGE_MS
from buffer_service.store.calls import Calls
from buffer_service.store.keys import index_key
from buffer_service.store.payloads.audit import Audit
from buffer_service.store.transport.index import Index
from buffer_service.store.users import PayloadUsers
from buffer_wire.errors import LayoutChanged, RolloutBufferError, StoreUnavailable, UnknownRun

SWEPT_AT_ONCE = 16
"""Runs of a cluster that are swept at the same time."""


class _PayloadsLeft(Exception):
    """Payloads of a run are left on servers that are away; the next sweep goes on."""

    def __init__(self, why: RolloutBufferError) -> None:
        super().__init__(why.message)
        self.why = why


class Housekeeping:
    """Housekeeping of the store: lists, sweeps and deletes runs."""

    def __init__(self, connection: Index, calls: Calls, users: PayloadUsers, audit: Audit | None = None) -> None:
        self._connection = connection
        self._calls = calls
        self._users = users
        self._audit = audit
        self._last_named: list[str] = []

    async def list_runs(self) -> Sequence[str]:
        """Ids of all runs that exist, sorted."""
        return await self._connection.existing(await self._named_runs())

    async def delete_run(self, run_id: str) -> None:
        """Delete a run, or go on with a deletion that somebody else began."""
        try:
            await self._delete(run_id, begin=True)
        except _PayloadsLeft as left:
            raise left.why from left

    async def sweep(self) -> int:
        """Sweep every run; returns how many things were done."""
        refused: RolloutBufferError | None = None
        at_once = SWEPT_AT_ONCE if self._connection.is_spread else 1
        try:
            self._last_named = await self._named_runs()
        except StoreUnavailable as failure:
            # Of a cluster another shard may have the runs.
            if not self._connection.is_spread:
                raise
            refused = failure
        done = 0
        for first in range(0, len(self._last_named), at_once):
            portion = self._last_named[first : first + at_once]
            for swept, refusal in await asyncio.gather(*map(self._swept, portion)):
                done += swept
                refused = refused or refusal
        done += await self._users.expire(self._named_runs)
        if self._audit is not None:
            done += await self._audit.run()
        if refused is not None:
            raise refused
        return done

    async def _swept(self, run_id: str) -> tuple[int, RolloutBufferError | None]:
        """Sweep a run: how many things were done, and why no more.

        That one run is another version's, or has something on a server that is away, is no reason for leases of the
        others to stay.
        """
        try:
            return await self._sweep(run_id), None
        except LayoutChanged as refusal:
            return 0, refusal
        except _PayloadsLeft as left:
            return 0, left.why
        except StoreUnavailable as failure:
            if not self._connection.is_spread:
                raise
            return 0, failure

    async def _sweep(self, run_id: str) -> int:
        done, more = 0, 1
        while more:
            try:
                swept, more = await self._calls.call(runs.sweep_portion(run_id, STAGING_AGE_MS))
            except UnknownRun:
                done += await self._bury(run_id)
                break
            done += swept
        return done + await self._delete_trash(run_id)

    async def _delete_trash(self, run_id: str) -> int:
        deleted = await self._calls.delete_trash(run_id)
        if deleted.away is not None:
            raise _PayloadsLeft(deleted.away)
        return len(deleted.keys)

    async def _delete(self, run_id: str, *, begin: bool) -> int:
        """Delete payloads until none is left; returns how many went."""
        deleted = 0
        more = await self._calls.call(runs.delete_portion(run_id, begin=begin))
        self._calls.forget(run_id)
        await self._users.forget(run_id)
        while more:
            deleted += await self._delete_trash(run_id)
            try:
                more = await self._calls.call(runs.delete_portion(run_id, begin=False))
            except UnknownRun:
                # Somebody else, who went on with it too, did the rest.
                break
        await self._forget(run_id)
        return deleted

    async def _bury(self, run_id: str) -> int:
        """Go on with the deletion of a run that nobody finds, if it is one; take its name off the list."""
        try:
            return await self._delete(run_id, begin=False)
        except UnknownRun:
            await self._forget(run_id)
            return 0

    async def _forget(self, run_id: str) -> None:
        await self._connection.command("SREM", self._connection.names.runs, run_id)
        # Somebody may have created one of the same name in between.
        if await self._exists(run_id):
            await self._connection.command("SADD", self._connection.names.runs, run_id)

    async def _exists(self, run_id: str) -> bool:
        return bool(await self._connection.command("EXISTS", index_key(run_id, "run")))

    async def _named_runs(self) -> list[str]:
        return sorted(
            text(run_id) for run_id in await self._connection.command("SMEMBERS", self._connection.names.runs)
        )
