"""What the operations share: a connection, and calls of scripts that refuse in the contract's errors."""

import contextlib
from collections.abc import Sequence

from buffer_service.domain.ops import Buffer
from buffer_service.store.keys import index_key
from buffer_service.store.recent import RecentPayloads
from buffer_service.store.replies import Fields, pack, parse
from buffer_service.store.scripts import load_scripts
from buffer_service.store.transport.connection import StoreConnection
from buffer_wire.errors import (
    LayoutChanged,
    NotReplicated,
    StoreFault,
    StoreOutOfDisk,
    StoreOutOfMemory,
    UnknownRun,
)


class StoreBase:
    """A connection and the runs that are known to exist on it."""

    def __init__(self, connection: StoreConnection, recent: RecentPayloads) -> None:
        self._connection = connection
        self._recent = recent
        self._scripts = load_scripts()
        self._known: set[str] = set()

    async def _call(
        self, script: str, run_id: str, arguments: bytes, *, acknowledges: bool = True
    ) -> tuple[str, Fields]:
        """Run a script. Raises what its refusal stands for."""
        reply = await self._connection.run(self._scripts[script], run_id, arguments, acknowledges=acknowledges)
        return parse(run_id, reply)

    async def _call_with_payloads(
        self, script: str, run_id: str, arguments: bytes, payloads: Sequence[tuple[str, Buffer]]
    ) -> tuple[str, Fields]:
        """Store payloads and run the script that indexes them.

        Nothing is written for a run that does not exist; a payload that the script did not take over is deleted.
        """
        if not payloads:
            return await self._call(script, run_id, arguments)
        await self._check_exists(run_id)
        keys = [key for key, _ in payloads]
        try:
            reply = await self._connection.store_and_run(payloads, self._scripts[script], run_id, arguments)
            return parse(run_id, reply)
        except (LayoutChanged, UnknownRun, StoreOutOfMemory):
            self._known.discard(run_id)
            await self._delete_staged(run_id, keys)
            raise
        except (NotReplicated, StoreOutOfDisk):
            # It may have run. The caller comes again with the same groups under new keys: nobody would come for those
            # that are blocked.
            with contextlib.suppress(StoreFault):
                await self._call("abandon", run_id, pack(keys))
            raise

    async def _check_exists(self, run_id: str) -> None:
        if run_id not in self._known:
            if not await self._connection.command("EXISTS", index_key(run_id, "run")):
                raise UnknownRun(run_id)
            self._known.add(run_id)

    async def _delete_staged(self, run_id: str, keys: Sequence[str]) -> None:
        await self._connection.command("UNLINK", *keys)
        await self._connection.command("ZREM", index_key(run_id, "staging"), *keys)

    async def _free(self, run_id: str, more: int) -> None:
        """Go on freeing what a commit or checkpoint released, in portions that do not hold up the store."""
        while more:
            _, (more,) = await self._call("free", run_id, b"\x90")

    async def delete_trash(self, run_id: str, portion: int = 500) -> int:
        """Delete payloads that nothing refers to any more; returns how many keys were on trash.

        The keys leave the trash after their payloads are gone, so a crash in between repeats a deletion and loses none.
        """
        trash, deleted = index_key(run_id, "trash"), 0
        while keys := await self._connection.command("SRANDMEMBER", trash, portion):
            await self._connection.command("UNLINK", *keys)
            await self._connection.command("SREM", trash, *keys)
            deleted += len(keys)
        return deleted
