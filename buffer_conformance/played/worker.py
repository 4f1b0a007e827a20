"""The workers that the kit plays against a trainer: they lease, and push valid groups at once."""

import asyncio
import uuid
from typing import Any

from buffer_conformance.direct import Direct
from buffer_conformance.played.groups import made_group
from buffer_wire.errors import RolloutBufferError, RunPaused, UnknownRun
from rollout_buffer.v1 import common_pb2, weights_pb2

_LEASE_WAIT_MS = 1_000
_AGAIN_S = 0.2
_TRYING_S = 600.0


class KitWorker:
    """A worker played by the kit: its one engine loads every published version at once; `run` it as a task."""

    def __init__(self, direct: Direct, name: str) -> None:
        self._direct = direct
        self._name = name
        self._instance = uuid.uuid4().hex
        self._loaded = common_pb2.WeightVersion(term=1, version=0)
        self._requests = 0

    async def run(self) -> None:
        """Work until cancelled."""
        await self._report()
        while True:
            self._requests += 1
            reply = await self._call(
                "LeaseTasks",
                worker_id=self._name,
                instance_id=self._instance,
                request_id=f"r{self._requests}",
                engine_id=self._name,
                loaded=self._loaded,
                max_tasks=2,
                wait_ms=_LEASE_WAIT_MS,
            )
            if reply.published != self._loaded:
                self._loaded = reply.published
                await self._report()
            for lease in reply.leases:
                await self._call("PushGroup", group=made_group(lease, self._loaded))
            if not reply.leases:
                await asyncio.sleep(_AGAIN_S)

    async def _report(self) -> None:
        report = weights_pb2.EngineReport(
            engine_id=self._name,
            worker_id=self._name,
            state=weights_pb2.ENGINE_STATE_READY,
            loaded=self._loaded,
        )
        await self._call("ReportEngine", report=report)

    async def _call(self, method: str, **fields: Any) -> Any:  # noqa: ANN401 - as Direct.call
        return await self._direct.call(method, retry_on=_worth_waiting, trying_s=_TRYING_S, **fields)


def _worth_waiting(error: RolloutBufferError) -> bool:
    return error.retryable or isinstance(error, UnknownRun | RunPaused)
