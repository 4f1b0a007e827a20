"""SimulatedEngine: the timing and the bookkeeping of an engine, without a model. For load tests, planning and faults.

It is not SGLang and generates no language. It keeps what the rest of the system sees of an engine: slots that decode at
a given speed, answers of spread lengths, version spans across reloads in flight, and the three pause modes. Faults can
be injected. What it does about weights is in weights.py.

Invariants: a token's span names the version that was loaded when it was generated; while the engine is paused, stalled
or dead no token is generated; time passes on the injected clock only.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineMalformed, EngineTimeout, EngineUnavailable
from rollout_workers.engine.gate import Gate
from rollout_workers.engine.requests import check_requests, never_ran, unusable
from rollout_workers.engine.simulated.answers import AnswerOptions, answer_to
from rollout_workers.engine.simulated.cache import KvCache
from rollout_workers.engine.simulated.clock import Clock, WallClock
from rollout_workers.engine.simulated.decoding import Decoding
from rollout_workers.engine.simulated.slots import Slots
from rollout_workers.engine.simulated.weights import SimulatedWeights
from rollout_workers.engine.types import (
    DecodingListener,
    EngineInfo,
    EngineLoad,
    GeneratedSample,
    PauseMode,
    ProcessGroup,
    SampleRequest,
    TensorSpec,
    nobody_counts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngineOptions:
    """Speed and size of the simulated engine."""

    tokens_per_s: float = 200.0
    """Decoding speed of one slot."""
    crowding: float = 0.0
    """Share of the time of a token by which each further sample that decodes lengthens it for all; 0: none does."""
    kv_tokens: float = math.inf
    """Tokens of all samples that decode, prompts included, that fit the KV cache; beyond it the last ones wait."""
    slots: int = 32
    """Samples decoded at once; further ones wait their turn."""
    prefill_tokens_per_s: float = math.inf
    """Speed at which input, and after a retraction all of the context, is computed."""
    load_s: float = 0.05
    """Time to load weights."""
    context_length: int = 1 << 21
    version_label: str = "0"
    """Label of the weights that it starts with."""
    generate_timeout_s: float = 600.0
    """Default deadline of `generate`."""
    load_timeout_s: float = 120.0
    """Deadline of `load_files`, which without a pause waits for running samples first."""
    control_timeout_s: float = 15.0
    """Deadline of every other call."""
    answers: AnswerOptions = field(default_factory=AnswerOptions)

    def __post_init__(self) -> None:
        for name in ("tokens_per_s", "slots", "prefill_tokens_per_s", "generate_timeout_s", "control_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidField(name, getattr(self, name), "above 0")


class SimulatedEngine:
    """Implements Engine. Faults: `fail_next_loads`, `fail_samples`, `stall` and `unstall`, `die` and `revive`."""

    def __init__(
        self,
        options: SimulatedEngineOptions | None = None,
        *,
        clock: Clock | None = None,
        address: str = "simulated://0",
    ) -> None:
        self.options = options or SimulatedEngineOptions()
        self.on_decoding: DecodingListener = nobody_counts
        """See Engine. What holds a slot decodes."""
        self._clock: Clock = clock or WallClock()
        self._address = address
        self._gate = Gate()
        self._slots = Slots(self.options.slots)
        self.cache = KvCache(self.options.kv_tokens)
        self._decoding: dict[str, Decoding] = {}
        self._some_ended = asyncio.Event()
        self._paused: PauseMode | None = None
        self._unstalled = asyncio.Event()
        self._unstalled.set()
        self._why_given_up = ""
        self._given_up = asyncio.Event()
        """Event that is set, and replaced, when nobody waits any more for the calls under way."""
        self._dead = False
        self._deaths = 0
        self._samples_to_fail: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        """Number of times that a sample of each index ran to its end or was aborted, whatever came of it."""
        self._weights = SimulatedWeights(
            address,
            self._clock,
            label=self.options.version_label,
            load_s=self.options.load_s,
            reach=self._reach,
            at_rest=self._at_rest,
        )

    # --- Engine -----------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        await self._reach("asking for its settings")
        return EngineInfo(
            name="simulated",
            version="1",
            address=self._address,
            model_path="",
            vocab_size=self.options.answers.vocab_size,
            max_input_tokens=self.options.context_length - 1,
            context_length=self.options.context_length,
            max_running_requests=self.options.slots,
            takes_buckets=True,
        )

    async def vocab_size(self) -> int:
        return (await self.info()).vocab_size

    async def loaded_version(self) -> str:
        await self._reach("asking for the loaded version")
        return self._weights.in_force

    def check_sampling(self, request: SampleRequest) -> None:
        """See Engine. Nothing is beyond it."""

    async def was_restarted(self) -> bool:
        """See Engine. Its settings never change, and that it was revived is told by its label."""
        return False

    async def ready(self) -> bool:
        return not self._dead and not self._halted

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        check_requests(requests, await self.info())
        doing = f"generating {len(requests)} samples"
        allowed_s = self.options.generate_timeout_s if deadline_s is None else deadline_s
        deaths = self._deaths
        rids = [request.rid for request in requests]
        work = asyncio.create_task(self._generate(requests))
        alarm = asyncio.create_task(self._clock.sleep(allowed_s))
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait({work, alarm, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if given_up.done() and not work.done():
                error = EngineUnavailable(self._address, doing, self._why_given_up)
                made = (self._decoding[rid].result() for rid in rids if rid in self._decoding)
                error.partial = tuple(sample for sample in made if len(sample.output_ids))
                raise error
            if not work.done():
                if not self._unstalled.is_set() or self._gate.waiting.intersection(rids):
                    raise EngineTimeout(self._address, doing, allowed_s)
                await self.abort(rids)
            samples = await work
        finally:
            for task in (alarm, work, given_up):
                task.cancel()
            await asyncio.gather(alarm, work, given_up, return_exceptions=True)
        if deaths != self._deaths:
            error = EngineUnavailable(self._address, doing, "it died")
            error.partial = tuple(sample for sample in samples if len(sample.output_ids))
            raise error
        if samples and all(sample.fault for sample in samples):
            raise EngineMalformed(self._address, doing, samples[0].fault)
        return samples

    @property
    def tokens_in_hand(self) -> int:
        """See Engine. Its tokens arrive with the answer."""
        return 0

    def give_up(self, why: str) -> None:
        given_up, self._given_up = self._given_up, asyncio.Event()
        self._why_given_up = why
        given_up.set()

    def take_cut_off(self) -> int:
        """See Engine. Its tokens arrive with the answer."""
        return 0

    async def load(self) -> EngineLoad:
        await self._reach("asking for its load")
        waiting = len(self._slots.waiting) + self.cache.waiting
        running = len(self._decoding) - self.cache.waiting
        usage = min(running / self.options.slots, 1.0) if math.isinf(self.options.kv_tokens) else self.cache.usage
        return EngineLoad(running=running, waiting=waiting, token_usage=usage)

    async def abort(self, rids: Sequence[str]) -> None:
        await self._reach("aborting a request")
        await self._end(rids)

    async def pause(self, mode: PauseMode) -> None:
        await self._reach(f"pausing ({mode})")
        self._gate.close()
        self._paused = mode
        ends = mode is PauseMode.ABORT
        await self._end([rid for rid, sample in self._decoding.items() if ends or sample.adapter])
        for sample in self._decoding.values():
            sample.wake.set()

    async def resume(self) -> None:
        await self._reach("resuming")
        self._paused = None
        for sample in self._decoding.values():
            sample.wake.set()
        await self._gate.open()

    async def load_files(self, path: Path, version_label: str) -> None:
        """See Engine. `path` is not read: there is no model."""
        await self._weights.load(str(path), version_label)

    async def load_tensors(self, path: Path, version_label: str) -> None:
        """See Engine. `path` is not read: there is no model."""
        await self._weights.load(str(path), version_label)

    async def load_adapter(self, path: Path, version_label: str) -> None:
        """See Engine. `path` is not read: there is no model."""
        await self._weights.load_adapter(str(path), version_label)

    async def drop_adapter(self) -> None:
        self._weights.adapter = ""

    async def check_tensors(self, tensors: Sequence[TensorSpec]) -> None:
        """See Engine. Whatever comes is all of a model that is not there."""
        await self._reach(f"checking {len(tensors)} tensors")

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        """See Engine. Nobody is met: the group comes about, or fails as it was told to."""
        await self._weights.join_group(process_group, deadline_s=deadline_s)

    async def leave_group(self, group_name: str) -> None:
        await self._weights.leave_group(group_name)

    async def receive(
        self,
        tensors: Sequence[TensorSpec],  # noqa: ARG002 - Engine's signature
        *,
        buckets: Sequence[int] = (),  # noqa: ARG002
        group_name: str,
        version_label: str,
        deadline_s: float,  # noqa: ARG002
    ) -> None:
        """See Engine. Nothing is received: time passes, and the label changes."""
        await self._weights.receive(group_name, version_label)

    async def close(self) -> None:
        await self._end([*self._gate.waiting, *self._slots.waiting, *self._decoding])

    # --- faults -----------------------------------------------------------------------------------------------

    def fail_next_loads(self, count: int) -> None:
        """Refuse the next `count` loads, with the old weights kept."""
        self._weights.fail_next_loads(count)

    def fail_next_joins(self, count: int) -> None:
        """Let the next `count` process groups fail to come about."""
        self._weights.fail_next_joins(count)

    def fail_samples(self, sample_index: int, count: int) -> None:
        """Make the answers of the next `count` samples of this index unusable, although they run to their end."""
        self._samples_to_fail[sample_index] = count

    def stall(self) -> None:
        """Stall the engine: nothing goes on, and nothing is answered, until `unstall`."""
        self._unstalled.clear()
        for sample in self._decoding.values():
            sample.wake.set()

    def unstall(self) -> None:
        """Go on where `stall` stopped."""
        self._unstalled.set()
        for sample in self._decoding.values():
            sample.wake.set()

    async def die(self) -> None:
        """Fail every call in flight with EngineUnavailable, and every later one until `revive`."""
        self._dead = True
        self._deaths += 1
        await self._end([*self._gate.waiting, *self._slots.waiting, *self._decoding])

    async def revive(self) -> None:
        """Come back as a fresh process would: unpaused, with the weights of the start."""
        self._dead = False
        self._paused = None
        self._weights.start_anew()
        self._unstalled.set()
        await self._gate.open()

    # --- inside -----------------------------------------------------------------------------------------------

    @property
    def _halted(self) -> bool:
        return self._paused is not None or not self._unstalled.is_set()

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[None]:
        """Wait for running requests and let none start, as SGLang does without a pause. Raises EngineTimeout."""
        deadline_s = self._clock.now_s() + self.options.load_timeout_s
        self._gate.close()
        try:
            while self._decoding and self._paused is None:
                self._some_ended.clear()
                await self._sleep_unless(self._some_ended, deadline_s - self._clock.now_s())
                if not self._some_ended.is_set():
                    raise EngineTimeout(self._address, "waiting for running samples", self.options.load_timeout_s)
            yield
        finally:
            if self._paused is None:
                await self._gate.open()

    async def _reach(self, doing: str) -> None:
        """Return if the engine answers calls now. Raises EngineUnavailable, EngineTimeout."""
        if not self._unstalled.is_set():
            allowed_s = self.options.control_timeout_s
            await self._sleep_unless(self._unstalled, allowed_s)
            if not self._unstalled.is_set():
                raise EngineTimeout(self._address, doing, allowed_s)
        if self._dead:
            raise EngineUnavailable(self._address, doing, "it died")

    async def _sleep_unless(self, event: asyncio.Event, seconds: float) -> None:
        """Sleep on the clock, or until `event` is set."""
        sleep = asyncio.create_task(self._clock.sleep(seconds))
        woken = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({sleep, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            woken.cancel()
            await asyncio.gather(sleep, woken, return_exceptions=True)

    async def _end(self, rids: Sequence[str]) -> None:
        await self._gate.give_up(rids)
        for rid in rids:
            self._slots.send_away(rid)
            if (sample := self._decoding.get(rid)) is not None:
                sample.aborted = True
                sample.wake.set()
        self.cache.look_again()

    async def _generate(self, requests: Sequence[SampleRequest]) -> list[GeneratedSample]:
        given_up = await self._gate.pass_through({request.rid for request in requests})
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sample(request, given_up=request.rid in given_up)) for request in requests]
        return [task.result() for task in tasks]

    async def _sample(self, request: SampleRequest, *, given_up: bool) -> GeneratedSample:
        if given_up or not await self._slots.acquire(request.rid):
            return never_ran(request)
        sample = Decoding(
            request,
            answer_to(request, self.options.answers),
            self.options.answers.vocab_size,
            prefill_left_s=len(request.input_ids) / self.options.prefill_tokens_per_s,
            adapter=self._weights.adapter,
        )
        self._decoding[request.rid] = sample
        self._crowd_changed()
        self.on_decoding(1)
        try:
            await self.cache.enter(sample)
            await self._decode(sample)
        finally:
            self.cache.leave(sample)
            del self._decoding[request.rid]
            self._crowd_changed()
            self.on_decoding(-1)
            self._slots.release()
            self._some_ended.set()
            request.on_end()
        self.answered[request.sample_index] += 1
        if self._samples_to_fail[request.sample_index] > 0:
            self._samples_to_fail[request.sample_index] -= 1
            return unusable(request, "a fault was injected")
        return sample.result()

    def _crowd_changed(self) -> None:
        """Have all samples go on at the speed that there is now."""
        if self.options.crowding:
            for sample in self._decoding.values():
                sample.wake.set()

    async def _decode(self, sample: Decoding) -> None:
        """Let time pass until the answer is complete or aborted, and book the tokens of every stretch of it."""
        into_next_token = 0.0
        while not (sample.complete or sample.aborted):
            sample.wake.clear()
            if self._halted:
                if self._paused is PauseMode.RETRACT:
                    sample.prefill_left_s = sample.context / self.options.prefill_tokens_per_s
                await sample.wake.wait()
                continue
            if self.cache.retracts(sample):
                await self.cache.enter(sample, first=True)
                sample.prefill_left_s = sample.context / self.options.prefill_tokens_per_s
                continue
            label = sample.adapter or self._weights.label
            started_s = self._clock.now_s()
            rate = self.options.tokens_per_s / (1 + self.options.crowding * (len(self._decoding) - 1))
            left_s = (len(sample.answer.tokens) - sample.done - into_next_token) / rate
            sleep_s = min(sample.prefill_left_s + left_s, self.cache.look_in_s(rate))
            await self._sleep_unless(sample.wake, sleep_s)
            passed_s = self._clock.now_s() - started_s
            prefilled_s = min(sample.prefill_left_s, passed_s)
            sample.prefill_left_s -= prefilled_s
            into_next_token += (passed_s - prefilled_s) * rate
            count = math.floor(into_next_token + 1e-6)
            into_next_token = max(0.0, into_next_token - count)
            sample.add(count, label)
