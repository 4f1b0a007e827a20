"""What an operator does to a run, and what the run has recorded."""

import re
from collections.abc import Sequence
from typing import cast

from buffer_service.domain import ops
from buffer_service.store.base import StoreBase
from buffer_service.store.keys import index_key
from buffer_service.store.replies import pack, text
from buffer_wire.errors import InvalidField, UnknownRun
from buffer_wire.revision import Revision

_EVENT_ID = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


class ControlOps(StoreBase):
    """Pause, drain, continue, records."""

    async def pause_run(self, run_id: str) -> Revision:
        """See domain.ports.RunStore.pause_run."""
        return await self._control(run_id, "pause")

    async def drain_run(self, run_id: str) -> Revision:
        """See domain.ports.RunStore.drain_run."""
        return await self._control(run_id, "drain")

    async def continue_run(self, run_id: str) -> Revision:
        """See domain.ports.RunStore.continue_run."""
        return await self._control(run_id, "continue")

    async def records(self, run_id: str, after: str, limit: int) -> Sequence[ops.Record]:
        """See domain.ports.RunStore.records. Raises InvalidField for what is no event id."""
        if after and not _EVENT_ID.fullmatch(after):
            raise InvalidField("after", after, "an event id, or empty")
        if limit < 1:
            raise InvalidField("limit", limit, "at least 1")
        first = f"({after}" if after else "-"
        events = await self._connection.command("XRANGE", index_key(run_id, "record"), first, "+", "COUNT", limit)
        if not await self._connection.command("EXISTS", index_key(run_id, "run")):
            raise UnknownRun(run_id)
        return [ops.Record(text(event_id), text(kind), bytes(data)) for event_id, (_, kind, _, data) in events]

    async def _control(self, run_id: str, action: str) -> Revision:
        _, (revision,) = await self._call("control_run", run_id, pack(action))
        return cast("Revision", revision)
