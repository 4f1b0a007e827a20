"""Work of one lease from its grant to its end: prompt → generate → score → push, or back to the service.

Every lease ends in exactly one way: its group has a final answer; or it is handed back with whatever was generated
as its partial rollout: INTERRUPTED when the worker or the engine stopped, FAILED when something went wrong; or it was
lost or cancelled, and nobody is told anything. FAILED comes after every failed sample had its attempts here, and keeps
the siblings: whoever goes on generates only what is missing.
"""

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Callable

import structlog

from buffer_wire.errors import InvalidField, InvalidRequest, RolloutBufferError
from buffer_wire.limits import MAX_ERROR_CHARS, MAX_MESSAGE_BYTES
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.counters import describe
from rollout_workers.engine.errors import EngineError
from rollout_workers.errors import WorkerError
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.sampling import request_of
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.episodes import Episodes
from rollout_workers.tasks.keeper import LeaseEnd
from rollout_workers.tasks.rollout import SingleTurn
from rollout_workers.tasks.scoring import GroupRewards
from rollout_workers.tasks.tools import Tools
from rollout_workers.tracing.attempt import UNTRACED, Trace
from rollout_workers.versions import Version

ENDED_WELL = frozenset({"queued", "recorded", "duplicate", "closed", "filtered"})

GiveBack = Callable[[tasks_pb2.LeaseReturn], Awaitable["tasks_pb2.ReturnOutcome.ValueType"]]

_NOT_KEPT = {
    tasks_pb2.RETURN_OUTCOME_PENDING: "not_kept",
    tasks_pb2.RETURN_OUTCOME_FAILED: "task_failed",
    tasks_pb2.RETURN_OUTCOME_LOST: "lease_ended",
}
"""Reasons why tokens that were handed back are kept by nobody."""

_log = structlog.get_logger()


class Stage(enum.StrEnum):
    """Stage of a lease's work."""

    PREPARING = enum.auto()
    GENERATING = enum.auto()
    SCORING = enum.auto()
    PUSHING = enum.auto()
    RETURNING = enum.auto()


class Work:
    """The work of one lease. `on_freed` is called when samples of it have ended that held slots of the engine."""

    def __init__(
        self,
        lease: tasks_pb2.Lease,
        slot: EngineSlot,
        tools: Tools,
        *,
        trace: Trace = UNTRACED,
        give_back: GiveBack,
        on_freed: Callable[[], None],
    ) -> None:
        self.lease = lease
        self._stage = Stage.PREPARING
        self._trace = trace
        self._limits = tools.limits.of(lease.task)
        self._slot = slot
        self._tools = tools
        self._give_back = give_back
        self._on_freed = on_freed
        self._progress: GroupProgress | None = None
        self._turn: SingleTurn | Episodes | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = False
        """True once the lease is known not to be ours."""
        self._lost = False
        """True when the work was ended because the lease is not ours."""
        self._interrupted = False
        self._cut = False
        self._settled = False
        """True once the counters know what became of the tokens."""

    @property
    def stage(self) -> Stage:
        """Stage that the work is in."""
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        self._stage = stage
        self._trace.entered(stage)

    @property
    def pinned(self) -> Version | None:
        """Weights that all of the group has to come from; None: any."""
        return Version.of(self.lease.pinned) if self.lease.HasField("pinned") else None

    @property
    def on_engine(self) -> bool:
        """True until generation has ended, or the work goes back."""
        return self.stage in (Stage.PREPARING, Stage.GENERATING)

    @property
    def running(self) -> float:
        """Samples that hold slots of the engine, over the group's size; above 1 with surplus ones."""
        if self.stage is Stage.GENERATING and self._turn is not None:
            return self._turn.running / self.lease.task.group_size
        return (1 + self._surplus / self.lease.task.group_size) * (self.stage is Stage.PREPARING)

    async def run(self) -> None:
        """Do the work. Raises only what no repeat of a request to the service can mend."""
        self._task = asyncio.current_task()
        self._trace.entered(self.stage)
        try:
            # An engine that was lost while the lease request waited gets nothing that would only fail on it.
            ready = self._slot.leasable and not self._interrupted
            if not (ready and await self._make_and_push()) and not self._lost:
                await self._hand_back(tasks_pb2.RETURN_KIND_INTERRUPTED)
        except asyncio.CancelledError:
            if self._lost:
                return
            if not self._cut or self.stage is Stage.RETURNING:
                raise
            # Out of time while draining: what is there goes back.
            await self._hand_back(tasks_pb2.RETURN_KIND_INTERRUPTED)
        except (InvalidField, WorkerError) as error:
            await self._fail(error)
        except RolloutBufferError:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of ours over one task must not end the work on all others
            _log.exception("unexpected", lease=self.lease.lease_id)
            await self._fail(error)
        finally:
            self._settle("lease_ended")
            self._trace.ended()

    def ended(self, how: LeaseEnd) -> None:
        """Stop generating: the lease is not ours any more.

        A group that is made already is pushed all the same when the lease was lost: the first result of an open task
        counts, whoever made it. Of a cancelled lease nobody wants the group.
        """
        self._gone = True
        unmade = self.stage in (Stage.PREPARING, Stage.GENERATING)
        unwanted = how is LeaseEnd.CANCELLED and self.stage is not Stage.RETURNING
        if (unmade or unwanted) and self._task is not None:
            self._end(how)
            self._task.cancel()

    async def interrupt(self) -> None:
        """Stop generating and hand back what there is; work that is past generating goes on."""
        self._interrupted = True
        if self._turn is not None and self.stage is Stage.GENERATING:
            try:
                await self._turn.stop()
            except EngineError as error:
                _log.warning("abort failed", lease=self.lease.lease_id, error=str(error))

    def cut(self) -> None:
        """Hand back what there is now, as time is up, finished groups without an answer included."""
        self._interrupted = True
        if self._task is not None and self.stage is not Stage.RETURNING:
            self._cut = True
            self._task.cancel()

    # ── stages ───────────────────────────────────────────────────────────────

    async def _make_and_push(self) -> bool:
        """False when generation was interrupted."""
        tools = self._tools
        prompt, images = await tools.prompt(self.lease.task)
        progress = self._progress = self._begin(GroupProgress(self.lease, prompt, images=images, surplus=self._surplus))
        if not self._engine_can(progress):
            return False
        rewards = await self._make(progress)
        if rewards is None:
            return False
        self.stage = Stage.PUSHING
        tools.counters.named_failures(self.lease.task.environment, [sample.failure for sample in progress.samples])
        header, payload = progress.to_group(rewards, tools.worker_id)
        result = await tools.pusher.push(header, payload)
        self._trace.told(outcome=result.outcome, reward_mean=sum(rewards) / len(rewards))
        if result.outcome not in ENDED_WELL:
            why = str(result.error) if result.error is not None else result.outcome
            await self._fail(result.error or RolloutBufferError(f"the service answered {why}"), keep=False)
        else:
            self._settle("pushed")
        return True

    def _engine_can(self, progress: GroupProgress) -> bool:
        """False when the engine, as it was started, cannot sample as the task asks: others may. Raises InvalidField
        where that is the task's own failure.
        """
        slot, task = self._slot, self.lease.task
        request = request_of(task, 0, progress.prompt_ids, 1, generated=0)
        if progress.images:
            request = progress.with_images(request)
        if request.seed is not None and not slot.info.heeds_seeds:
            slot.say_once("seeds of tasks have no effect: start the server with --enable-deterministic-inference")
        try:
            slot.engine.check_sampling(request)
        except InvalidField as error:
            # The queue's tasks are alike: the engine gets no work any more, and the task goes back.
            if self.pinned is not None:
                raise
            slot.take_out(f"tasks ask for {error}")
            return False
        return True

    async def _make(self, progress: GroupProgress) -> list[float] | None:
        """Generate and score every sample; the rewards, or None when it was interrupted."""
        counters = self._tools.counters
        attempts = Attempts(self._limits.max_sample_attempts)
        rewards = GroupRewards(progress, self._tools.scorer, attempts, timeout_s=self._limits.reward_timeout_s)
        try:
            while await self._generate(progress, attempts):
                attempts.keep(self._cut_surplus(progress))
                self.stage = Stage.SCORING
                self._on_freed()
                began = time.monotonic()
                try:
                    anew = await rewards.ask()
                finally:
                    counters.rewarded += 1
                    counters.reward_s += time.monotonic() - began
                if not anew:
                    return rewards.in_order
                if self._gone:
                    self._end(LeaseEnd.LOST)
                    return None
            return None
        finally:
            counters.samples_again += attempts.again
            counters.failed_samples(self.lease.task.environment, attempts.errors)

    async def _generate(self, progress: GroupProgress, attempts: Attempts) -> bool:
        """Generate what is unfinished; False when it was interrupted."""
        counters = self._tools.counters
        tokens, cached, unfinished = progress.received, progress.cached, len(progress.unfinished)
        self._turn = self._way(progress, attempts)
        self.stage = Stage.GENERATING
        try:
            return not self._interrupted and await self._turn.run()
        finally:
            counters.tokens += progress.received - tokens
            counters.tokens_cached += progress.cached - cached
            counters.samples += unfinished - len(progress.unfinished)

    @property
    def _surplus(self) -> int:
        """Samples that begin beyond the group's size: none where some of it is there, or its weights are given."""
        taken = self.lease.HasField("partial_rollout") or self.pinned is not None
        return 0 if taken or self._tools.rollout is not None else self._tools.surplus_samples

    def _cut_surplus(self, progress: GroupProgress) -> list[int]:
        """Cut what is beyond the group's size; returns the indexes that the others had."""
        began = len(progress.samples)
        kept, tokens = progress.cut_surplus()
        cut = began - len(kept)
        self._tools.counters.surplus_samples += cut
        self._slot.surplus_samples += cut
        self._slot.surplus_tokens += tokens
        return kept

    def _way(self, progress: GroupProgress, attempts: Attempts) -> SingleTurn | Episodes:
        tools = self._tools
        if tools.rollout is None:
            return SingleTurn(
                progress,
                self._slot,
                attempts,
                timeout_s=self._limits.generate_timeout_s,
                on_freed=self._on_freed,
                spread=tools.spread if self.pinned is None else None,
            )
        return Episodes(
            progress,
            self._slot,
            attempts,
            rollout=tools.rollout,
            prompts=tools.prompts,
            timeout_s=self._limits.generate_timeout_s,
            on_freed=self._on_freed,
        )

    def _end(self, how: LeaseEnd) -> None:
        self._lost = True
        if how is LeaseEnd.CANCELLED:
            self._tools.counters.leases_cancelled += 1
        else:
            self._tools.counters.leases_lost += 1

    def _begin(self, progress: GroupProgress) -> GroupProgress:
        self._tools.counters.leases += 1
        if self.lease.HasField("partial_rollout"):
            refused = progress.take_partial_rollout()
            if refused is None:
                self._tools.counters.partial_rollouts += 1
                self._tools.counters.tokens_resumed += progress.resumed
            else:
                _log.warning("partial rollout not used", lease=self.lease.lease_id, why=refused)
        return progress

    # ── ways back ────────────────────────────────────────────────────────────

    async def _fail(self, error: BaseException, *, keep: bool = True) -> None:
        text = self._tools.counters.failed(error)
        self._trace.told(error=text)
        _log.warning("task failed", lease=self.lease.lease_id, stage=str(self.stage), error=text)
        await self._hand_back(tasks_pb2.RETURN_KIND_FAILED, describe(error), keep=keep)

    async def _hand_back(self, kind: "tasks_pb2.ReturnKind.ValueType", error: str = "", *, keep: bool = True) -> None:
        name = "failed" if kind == tasks_pb2.RETURN_KIND_FAILED else "interrupted"
        self.stage = Stage.RETURNING
        self._on_freed()
        back = tasks_pb2.LeaseReturn(
            lease_id=self.lease.lease_id,
            kind=kind,
            error=error[:MAX_ERROR_CHARS],
            partial_rollout=self._partial_rollout() if keep else None,
        )
        try:
            outcome = await self._give_back(back)
        except InvalidRequest as refused:
            _log.error("partial rollout refused", lease=self.lease.lease_id, error=str(refused))
            back.ClearField("partial_rollout")
            with contextlib.suppress(InvalidRequest):  # Then it expires.
                await self._give_back(back)
            self._settle("partial_rollout_refused")
        else:
            kept = back.HasField("partial_rollout") and outcome == tasks_pb2.RETURN_OUTCOME_PENDING
            self._settle("returned" if kept else _NOT_KEPT.get(outcome, "not_kept"))
        self._tools.counters.returned[name] += 1

    def _settle(self, how: str) -> None:
        """Say, once, what became of the tokens: "pushed", "returned", or why they are discarded."""
        progress, counters = self._progress, self._tools.counters
        if progress is None or self._settled:
            return
        self._settled = True
        self._trace.told(settled=how, samples=len(progress.samples), tokens=progress.generated)
        counters.tokens_discarded.update(progress.discarded)
        if how == "pushed":
            counters.tokens_pushed += progress.generated
        elif how == "returned":
            counters.tokens_returned += progress.generated
        elif progress.generated:
            counters.tokens_discarded[how] += progress.generated

    def _partial_rollout(self) -> groups_pb2.Group | None:
        # A pinned task begins anew, perhaps on another engine: what there is so far is of no use.
        if self._progress is None or self.pinned is not None:
            return None
        self._cut_surplus(self._progress)
        partial_rollout = self._progress.to_partial_rollout(self._tools.worker_id)
        if partial_rollout is not None and partial_rollout.ByteSize() > MAX_MESSAGE_BYTES - (1 << 20):
            _log.warning("partial rollout is too large to keep", lease=self.lease.lease_id)
            return None
        return partial_rollout
