"""The scenarios for a trainer. The kit is its workers, the trouble on its way to the service, and another trainer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

from buffer_conformance.direct import Direct
from buffer_conformance.faults import When, always
from buffer_conformance.played.worker import KitWorker
from buffer_conformance.record import Record
from buffer_conformance.rules.trainer import EXIT_WITHIN_S
from buffer_conformance.stage import Stage, SuiteOptions, beside, staged

_WORKERS = 2
_PUBLISHES = 2
_PAUSED_S = 1.5
_OPTIONAL_S = 10.0


async def run_trainer_suite(options: SuiteOptions) -> Record:
    """Run the candidate through all scenarios; the record of it. Raises DidNotStart, RolloutBufferError."""
    async with staged(options) as (stage, direct):
        workers = [KitWorker(direct, f"conformance-{i}").run() for i in range(_WORKERS)]
        async with beside(*workers):
            await TrainerSuite(stage, direct).run()
    return stage.record


class TrainerSuite:
    """Scenarios that one candidate, a trainer, is taken through."""

    def __init__(self, stage: Stage, direct: Direct) -> None:
        self._stage = stage
        self._direct = direct

    async def run(self) -> None:
        """Run all scenarios, one after the other."""
        for name, scenario in TRAINER_SCENARIOS.items():
            async with self._stage.scenario(name) as wanted:
                if wanted:
                    if not self._stage.candidate_runs and name not in ("start", "started again"):
                        await self._stage.start_candidate()
                        await self.goes_on()
                    await scenario(self)

    # ── scenarios ────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Scenario: the candidate starts, and its first resume is not answered."""
        fault = self._stage.proxy.faults.lose_reply("Resume")
        await self._stage.start_candidate()
        await self._stage.until_fired(fault, "a resume")
        await self.goes_on()

    async def lost(self, method: str, *, when: When = always, needed: bool = True) -> None:
        """Scenario: a reply of the method does not arrive; where not `needed`, the candidate may never call it."""
        stage = self._stage
        fault = stage.proxy.faults.lose_reply(method, when=when)
        if needed:
            await stage.until_fired(fault, f"a call of {method}")
        else:
            # Publishing commits too, and nobody has to checkpoint.
            await stage.at_most(_OPTIONAL_S, fault.fired.is_set, "a while")
            fault.disarm()
        await self.goes_on()

    async def away(self) -> None:
        """Scenario: the service cannot be reached for seconds."""
        await self._stage.proxy.away(self._stage.options.away_s)
        await self.goes_on()

    async def paused(self) -> None:
        """Scenario: an operator holds the run, and continues it."""
        await self._direct.call("PauseRun")
        await asyncio.sleep(_PAUSED_S)
        await self._direct.call("ContinueRun")
        await self.goes_on()

    async def taken_over(self) -> None:
        """Scenario: another trainer resumes the run."""
        # Noted before it is done: the candidate may be refused before the kit has its own answer.
        self._stage.record.mark("taken_over")
        await self._direct.call("Resume", request_id=uuid4().hex)
        await self._stage.end_candidate(EXIT_WITHIN_S, terminate=False)

    async def started_again(self) -> None:
        """Scenario: the candidate is started anew, and resumes the run."""
        await self._stage.start_candidate()
        await self.goes_on()

    # ── parts ────────────────────────────────────────────────────────────────

    def _published(self) -> int:
        return sum(exchange.reply is not None for exchange in self._stage.record.of("Publish"))

    async def goes_on(self) -> None:
        """Scenario: the candidate trains until it has published some more versions."""
        wanted = self._published() + _PUBLISHES
        await self._stage.until(lambda: self._published() >= wanted, f"{_PUBLISHES} more versions")


def _loses(method: str, *, when: When = always, needed: bool = True) -> Callable[[TrainerSuite], Awaitable[None]]:
    return lambda suite: suite.lost(method, when=when, needed=needed)


TRAINER_SCENARIOS: Mapping[str, Callable[[TrainerSuite], Awaitable[None]]] = {
    "start": TrainerSuite.start,
    "plain training": TrainerSuite.goes_on,
    "lost submit reply": _loses("SubmitTasks"),
    "lost batch": _loses("PullBatch", when=lambda reply: reply.HasField("batch")),
    "lost publish reply": _loses("Publish"),
    "lost commit reply": _loses("Commit", needed=False),
    "lost checkpoint reply": _loses("Checkpoint", needed=False),
    "lost reject reply": _loses("Reject", when=lambda reply: reply.rejected_groups > 0, needed=False),
    "service away": TrainerSuite.away,
    "paused run": TrainerSuite.paused,
    "taken over": TrainerSuite.taken_over,
    "started again": TrainerSuite.started_again,
}
"""Scenarios by name, in the order in which they are run."""
