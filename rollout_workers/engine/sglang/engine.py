"""SglangEngine: a running SGLang server as an Engine, over its native HTTP interface. Seen working with SGLang 0.5.23.

The server's habits that shape this file; each is a requirement, with a test:
- A token id outside the vocabulary ends the whole process, so every request is checked first (requests.py). The
  vocabulary is asked of the server (settings.py).
- /health generates a token, and asked during a pause it marks the server unhealthy: /ready is polled instead.
- Abort matches by prefix (ids have one length). It ignores ids that have not arrived yet (sent again until they end).
  It does nothing to requests held back by a pause (gate.py keeps them on our side).
- A plain request whose client leaves goes on for seconds: a cancelled `generate` aborts its requests itself.
- A paused server holds every /generate back, also one that it would refuse: what `info` needs is asked before a pause,
  and a server that somebody else left paused has to be resumed before anything.
- A pause in mode abort looks for running requests once a second: aborting them first saves that second.

Weights are loaded in weights.py, adapters in adapters.py.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffer_wire.connection.retry import Backoff
from rollout_workers.engine.calls import HttpEngine, ServerOptions
from rollout_workers.engine.errors import (
    EngineError,
    EngineMalformed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from rollout_workers.engine.requests import check_requests, never_ran
from rollout_workers.engine.sglang import settings
from rollout_workers.engine.sglang.adapters import SglangAdapters
from rollout_workers.engine.sglang.generation.calls import SglangGenerate
from rollout_workers.engine.sglang.generation.wire import ODD
from rollout_workers.engine.sglang.weights import SglangWeights
from rollout_workers.engine.types import (
    EngineInfo,
    EngineLoad,
    GeneratedSample,
    PauseMode,
    ProcessGroup,
    SampleRequest,
    TensorSpec,
)

_FULL_QUEUE = Backoff(first_s=0.1, ceiling_s=2.0)
_ABORT_AGAIN_AFTER_S = (0.05, 0.2, 0.5)
_ABORT_S = 5.0
"""Longest wait for the answer to one abort: a drain waits on it."""


class SglangEngine(HttpEngine):
    """Engine that drives one SGLang server. `vocab_size` overrides what the server says."""

    def __init__(
        self,
        base_url: str,
        *,
        options: ServerOptions | None = None,
        vocab_size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(base_url, options=options, headers=headers)
        self._weights = SglangWeights(self._calls)
        self._adapters = SglangAdapters(self._calls)
        self._known_vocab_size = vocab_size
        self._info: EngineInfo | None = None
        self._start: dict[str, Any] | None = None
        """Start fields, which tell the process that `_info` is about from a later one."""
        self._generate_calls: SglangGenerate | None = None

    # --- what the server says about itself --------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """See Engine. Asked of the server once."""
        async with self._connecting:
            if self._info is None:
                self._info = await self._connect()
        return self._info

    async def vocab_size(self) -> int:
        return (await self.info()).vocab_size

    async def loaded_version(self) -> str:
        """See Engine. The adapter in force, if the server says that it holds it; else the label of its weights."""
        adapter = self._adapters.current
        return adapter if adapter and await self._adapters.is_held() else await self._weights.loaded_version()

    async def check_version(self) -> None:
        """Raise EngineUnfit if it says that it is too old; other EngineErrors where it does not answer yet."""
        await settings.check_version(self._calls)

    def check_sampling(self, request: SampleRequest) -> None:
        if self._generate_calls is not None:
            self._generate_calls.check_sampling(request)

    async def ready(self) -> bool:
        try:
            reply = await self._http.call(
                "GET",
                "/ready",
                doing="asking if it is ready",
                deadline_s=self.options.ready_timeout_s,
                repeatable=False,
            )
        except EngineError:
            return False
        return reply.status == 200

    async def load(self) -> EngineLoad:
        """See Engine. Summed over the server's data-parallel ranks."""
        doing = "asking for its load"
        reply = await self._calls.get("/v1/loads?include=core", doing)
        try:
            ranks = reply["loads"]
            return EngineLoad(
                running=sum(int(rank["num_running_reqs"]) for rank in ranks),
                waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                token_usage=max((float(rank["token_usage"]) for rank in ranks), default=0.0),
            )
        except ODD as error:
            raise EngineMalformed(self.address, doing, f"{type(error).__name__} {error}") from error

    async def was_restarted(self) -> bool:
        return self._start is not None and await settings.was_restarted(self._calls, self._start)

    async def _connect(self) -> EngineInfo:
        found = await settings.ask(self._calls, vocab_size=self._known_vocab_size)
        await self._weights.found(found.label, found.model_path, ranks=found.ranks)
        await self._adapters.found(found.adapters)
        self._generate_calls = SglangGenerate(
            self._calls,
            self._flights,
            found.settings,
            lambda: self._weights.label,
            self._adapters,
            self._say_decoding,
        )
        self._start = found.start
        return found.info

    # --- generation -------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        """See Engine. One HTTP request for all: twice as fast as one each."""
        if not requests:
            return []
        allowed_s = self.options.generate_timeout_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + allowed_s
        check_requests(requests, await self.info())
        done: dict[str, GeneratedSample] = {}
        async with self._flights.of(requests):
            try:
                await self._generate(requests, done, deadline, allowed_s)
            except EngineError as error:
                error.partial = (*(sample for sample in done.values() if len(sample.output_ids)), *error.partial)
                raise
        return [done.get(request.rid) or never_ran(request) for request in requests]

    async def _generate(
        self, requests: Sequence[SampleRequest], done: dict[str, GeneratedSample], deadline: float, allowed_s: float
    ) -> None:
        """Fill `done` with what was generated; a request that is not in it was given up before it ran."""
        generation, waits, room_by = await self._generation(), _FULL_QUEUE.delays(), float("inf")
        waiting = list(requests)
        while waiting := await self._flights.let_through(waiting, deadline, allowed_s):
            answer = await generation.call(waiting, deadline=deadline, allowed_s=allowed_s)
            done |= {sample.rid: sample for sample in answer.samples}
            waiting = [request for request in waiting if request.rid in answer.refused]
            if not waiting:
                return
            room_by = min(room_by, time.monotonic() + self.options.full_queue_wait_s)
            pause_s, why = next(waits), answer.refused[waiting[0].rid]
            if time.monotonic() + pause_s > min(room_by, deadline):
                doing = f"generating {len(waiting)} samples"
                raise EngineRejected(self.address, doing, why.status, why.message)
            await asyncio.sleep(pause_s)

    async def _generation(self) -> SglangGenerate:
        await self.info()
        if self._generate_calls is None:
            raise AssertionError("connected without settings")
        return self._generate_calls

    async def abort(self, rids: Sequence[str]) -> None:
        """See Engine. Returns when they have ended, or after a second of trying.

        What the server does not let go is ended here, with what has arrived of it; then its refusal is raised.
        """
        await self._flights.give_up(rids)
        refusal: EngineError | None = None
        for again_after_s in _ABORT_AGAIN_AFTER_S:
            live = self._flights.sent(rids)
            if not live:
                return
            refusal = await self._tell_to_abort(live)
            if isinstance(refusal, EngineTimeout | EngineUnavailable):
                break  # It would not answer the next one either.
            await self._flights.until_ended(live, again_after_s)
        live = self._flights.live.intersection(rids)
        if refusal is None or not live:
            return
        self._flights.end_calls(f"it does not abort: {refusal}", live)
        raise refusal

    async def _tell_to_abort(self, rids: set[str]) -> EngineError | None:
        """Send one abort for each; returns the first error, or None. One that fails costs the others nothing."""
        allowed_s = min(_ABORT_S, self.options.control_timeout_s)
        outcomes = await asyncio.gather(
            *(
                self._calls.post_ok("/abort_request", {"rid": rid}, "aborting a request", deadline_s=allowed_s)
                for rid in sorted(rids)
            ),
            return_exceptions=True,
        )
        refusals = [outcome for outcome in outcomes if isinstance(outcome, EngineError)]
        for outcome in outcomes:
            if outcome is not None and outcome not in refusals:
                raise outcome
        return refusals[0] if refusals else None

    # --- weights ----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        await self.info()  # a paused server answers none of the questions that need its tokenizer
        if self._adapters.in_use:
            mode = PauseMode.ABORT  # An adapter does not go with the weights that come.
        doing = f"pausing ({mode})"
        gate = self._flights.gate
        was_open = gate.is_open
        gate.close()
        deadline_s = self.options.control_timeout_s
        try:
            if mode is PauseMode.ABORT:
                deadline_s = self.options.pause_abort_timeout_s
                await self._calls.post_ok("/abort_request", {"abort_all": True}, doing)
                await self._flights.until_ended(self._flights.sent(), _ABORT_AGAIN_AFTER_S[-1])
            await self._calls.post_ok("/pause_generation", {"mode": str(mode)}, doing, deadline_s=deadline_s)
        except BaseException:
            if was_open:
                await gate.open()
            raise
        self._weights.paused = mode

    async def resume(self) -> None:
        await self._calls.post_ok("/continue_generation", {}, "resuming")
        self._weights.paused = None
        await self._flights.gate.open()

    async def load_files(self, path: Path, version_label: str) -> None:
        """See Engine. `path` must mean the same to the server as it does here."""
        await self.info()
        await self._weights.load_files(path, version_label)
        self._adapters.drop()

    async def load_tensors(self, path: Path, version_label: str) -> None:
        await self.info()
        await self._weights.load_tensors(path, version_label)
        self._adapters.drop()

    async def load_adapter(self, path: Path, version_label: str) -> None:
        """See Engine. `path` must mean the same to the server as it does here."""
        await self.info()
        await self._adapters.load(path, version_label, model=self._weights.layout, end=self.abort)

    async def drop_adapter(self) -> None:
        self._adapters.drop()

    async def check_tensors(self, tensors: Sequence[TensorSpec]) -> None:
        await self.info()
        self._weights.check_tensors(tensors)

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        await self._weights.join_group(process_group, deadline_s=deadline_s)

    async def leave_group(self, group_name: str) -> None:
        await self._weights.leave_group(group_name)

    async def receive(
        self,
        tensors: Sequence[TensorSpec],
        *,
        buckets: Sequence[int] = (),
        group_name: str,
        version_label: str,
        deadline_s: float,
    ) -> None:
        await self._weights.receive(
            tensors, buckets=buckets, group_name=group_name, version_label=version_label, deadline_s=deadline_s
        )
        self._adapters.drop()

    async def checksums(self) -> dict[str, str]:
        """A checksum of every parameter, as the server names and holds it, to compare servers with each other."""
        return await self._weights.checksums()

    async def close(self) -> None:
        if live := self._flights.live:
            await self._flights.gate.give_up(live)
            await (await self._generation()).abort_quietly(sorted(live))
        await self._http.close()
