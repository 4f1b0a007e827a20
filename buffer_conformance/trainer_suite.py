"""The scenarios for a trainer. The kit is its workers, the trouble on its way to the service, and another trainer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from uuid import uuid4

from buffer_conformance.child import service_at
from buffer_conformance.direct import Direct
from buffer_conformance.faults import When, always
from buffer_conformance.kit_worker import KitWorker
from buffer_conformance.proxy import Proxy
from buffer_conformance.record import Record
from buffer_conformance.stage import Stage, SuiteOptions
from buffer_conformance.trainer_rules import EXIT_WITHIN_S
from buffer_wire.errors import RolloutBufferError

_WORKERS = 2
_PUBLISHES = 2
_PAUSED_S = 1.5
_OPTIONAL_S = 10.0


async def run_trainer_suite(options: SuiteOptions) -> Record:
    """Run the candidate through all scenarios; the record of it. Raises DidNotStart, RolloutBufferError."""
    record, run_id = Record(), f"conformance-{uuid4().hex[:8]}"
    async with (
        service_at(options.service) as service,
        Proxy(service, record) as proxy,
        Direct(service, run_id) as direct,
    ):
        stage = Stage(options, proxy, run_id)
        workers = [asyncio.create_task(KitWorker(direct, f"conformance-{i}").run()) for i in range(_WORKERS)]
        try:
            await TrainerSuite(stage, direct).run()
        finally:
            for worker in workers:
                worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
            if stage.child is not None:
                await stage.child.kill()
            with contextlib.suppress(RolloutBufferError):
                await direct.call("DeleteRun", trying_s=5.0)
        for error in ended:
            if isinstance(error, Exception):
                raise error
    return record


class TrainerSuite:
    """One candidate's way through the scenarios."""

    def __init__(self, stage: Stage, direct: Direct) -> None:
        self._stage = stage
        self._direct = direct

    async def run(self) -> None:
        """All scenarios, one after the other."""
        for name, scenario in self._scenarios().items():
            async with self._stage.scenario(name) as wanted:
                if wanted:
                    if not self._stage.candidate_runs and name not in ("start", "started again"):
                        await self._stage.start_candidate()
                    await scenario()

    def _scenarios(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            "start": self._start,
            "plain training": self._goes_on,
            "lost submit reply": lambda: self._lost("SubmitTasks"),
            "lost batch": lambda: self._lost("PullBatch", when=lambda reply: reply.HasField("batch")),
            "lost publish reply": lambda: self._lost("Publish"),
            "lost commit reply": lambda: self._lost("Commit", needed=False),
            "lost checkpoint reply": lambda: self._lost("Checkpoint", needed=False),
            "service away": self._away,
            "paused run": self._paused,
            "taken over": self._taken_over,
            "started again": self._started_again,
        }

    # ── scenarios ────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        fault = self._stage.proxy.faults.lose_reply("Resume")
        await self._stage.start_candidate()
        await self._stage.until_fired(fault, "a resume")
        await self._goes_on()

    async def _lost(self, method: str, *, when: When = always, needed: bool = True) -> None:
        stage = self._stage
        fault, limit_s = stage.proxy.faults.lose_reply(method, when=when), stage.record.now_s() + _OPTIONAL_S
        if needed:
            await stage.until_fired(fault, f"a call of {method}")
        else:
            # Publishing commits too, and nobody has to checkpoint.
            await stage.until(lambda: fault.fired.is_set() or stage.record.now_s() > limit_s, "a while")
            fault.disarm()
        await self._goes_on()

    async def _away(self) -> None:
        await self._stage.proxy.away(self._stage.options.away_s)
        await self._goes_on()

    async def _paused(self) -> None:
        await self._direct.call("PauseRun")
        await asyncio.sleep(_PAUSED_S)
        await self._direct.call("ContinueRun")
        await self._goes_on()

    async def _taken_over(self) -> None:
        reply = await self._direct.call("Resume", request_id=uuid4().hex)
        self._stage.record.mark("taken_over", epoch=reply.epoch)
        await self._stage.end_candidate(EXIT_WITHIN_S, terminate=False)

    async def _started_again(self) -> None:
        await self._stage.start_candidate()
        await self._goes_on()

    # ── parts ────────────────────────────────────────────────────────────────

    def _published(self) -> int:
        return sum(exchange.reply is not None for exchange in self._stage.record.of("Publish"))

    async def _goes_on(self) -> None:
        wanted = self._published() + _PUBLISHES
        await self._stage.until(lambda: self._published() >= wanted, f"{_PUBLISHES} more versions")
