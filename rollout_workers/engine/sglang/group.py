"""Membership of one SGLang server in process groups. Seen working with SGLang 0.5.23.

The server's habits that shape this file:
- Joining blocks its scheduler: nothing is generated, and no other command is answered, until all members are there.
  Its own deadline for that is torch's 30 minutes, so it is sent only where somebody listens at the meeting point; a
  meeting point that closes ends the wait at once.
- It forgets nothing: a name that is in use refuses a second group, so an older group of the name is given up first.
"""

import asyncio
import time
from http import HTTPStatus

from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineLoadFailed, EngineRejected
from rollout_workers.engine.types import ProcessGroup

_POLL_AGAIN_S = 0.1
_NOT_A_MEMBER = "does not exist"


class SglangGroup:
    """Membership of one server: joins and leaves process groups."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    async def join(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        deadline_at = time.monotonic() + deadline_s
        await self.leave(process_group.group_name)
        await self._until_somebody_listens(process_group, deadline_at, deadline_s)
        doing = f"joining process group {process_group.group_name}"
        body = {
            "master_address": process_group.master_address,
            "master_port": process_group.master_port,
            "rank_offset": process_group.rank,
            "world_size": process_group.world_size,
            "group_name": process_group.group_name,
            "backend": process_group.backend,
        }
        reply = await self._calls.post(
            "/init_weights_update_group", body, doing, deadline_s=deadline_at - time.monotonic(), repeatable=False
        )
        if reply.status != HTTPStatus.OK:
            raise self._failed(process_group, reply.message)

    async def leave(self, group_name: str) -> None:
        doing = f"leaving process group {group_name}"
        reply = await self._calls.post("/destroy_weights_update_group", {"group_name": group_name}, doing)
        # Older servers have no such command, and one that is no member refuses it.
        if reply.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND) or _NOT_A_MEMBER in reply.message:
            return
        raise EngineRejected(self._calls.address, doing, reply.status, reply.message)

    async def _until_somebody_listens(self, process_group: ProcessGroup, deadline_at: float, deadline_s: float) -> None:
        """Wait until somebody listens at the group's address, as seen from here.

        Where the worker and its engine are on different machines that is the best guess.
        """
        while True:
            try:
                async with asyncio.timeout(deadline_at - time.monotonic()):
                    _, writer = await asyncio.open_connection(process_group.master_address, process_group.master_port)
                    writer.close()
                return
            except (OSError, TimeoutError) as error:
                if time.monotonic() + _POLL_AGAIN_S >= deadline_at:
                    where = f"{process_group.master_address}:{process_group.master_port}"
                    why = f"nobody listens at {where}, where it meets, within {deadline_s:g} s ({error})"
                    raise self._failed(process_group, why) from error
            await asyncio.sleep(_POLL_AGAIN_S)

    def _failed(self, process_group: ProcessGroup, cause: str) -> EngineLoadFailed:
        source = f"process group {process_group.group_name}"
        return EngineLoadFailed(self._calls.address, source, "to come", cause=cause, weights="kept")
