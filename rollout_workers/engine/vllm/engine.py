"""VllmEngine: a running vLLM server as an Engine, over its OpenAI-compatible completions and its endpoints for RL.

Written by vLLM's documentation and source; tested against a stub of its wire format, and not yet against a real server.

What the server does, and what follows for this file:
- Completions name no weights. So `pause` knows the mode abort alone, and returns when no request is under way: none
  lives through a load, and every token is of the label that was in force when its request was sent.
- An abort takes the ids of the server's own making. A request whose connection closes is aborted too: what does not end
  by the first way ends by the second, with what has arrived.
- A paused server holds new requests back: what `info` needs is asked before a pause, and requests wait on this side.
- The endpoints for pauses, aborts and weights are there under VLLM_SERVER_DEV_MODE=1 alone.
"""

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

from rollout_workers.engine.calls import HttpEngine, ServerOptions
from rollout_workers.engine.errors import (
    EngineError,
    EngineMalformed,
    EngineUnfit,
)
from rollout_workers.engine.requests import check_requests, never_ran
from rollout_workers.engine.types import (
    EngineInfo,
    EngineLoad,
    GeneratedSample,
    PauseMode,
    ProcessGroup,
    SampleRequest,
    TensorSpec,
)
from rollout_workers.engine.vllm import settings, wire
from rollout_workers.engine.vllm.answer import Answer
from rollout_workers.engine.vllm.generate import ABORT_AGAIN_AFTER_S, VllmCompletions
from rollout_workers.engine.vllm.weights import VllmWeights

_NOT_OFFERED = "vLLM takes weights from files alone: publish them so"


class VllmEngine(HttpEngine):
    """Engine that drives one vLLM server."""

    def __init__(
        self, base_url: str, *, options: ServerOptions | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(base_url, options=options, headers=headers)
        self._weights = VllmWeights(self._calls)
        self._found: settings.Found | None = None
        self._completions = VllmCompletions(self._calls, self._flights)

    # --- what the server says about itself --------------------------------------------------------------------

    async def _connected(self) -> settings.Found:
        async with self._connecting:
            if self._found is None:
                label, found = await settings.ask_label(self._calls), await settings.ask(self._calls)
                await self._weights.found(label, Path(found.info.model_path))
                self._found = found
        return self._found

    async def info(self) -> EngineInfo:
        """See Engine. Asked of the server once; costs one token."""
        return (await self._connected()).info

    async def vocab_size(self) -> int:
        return (await self.info()).vocab_size

    async def loaded_version(self) -> str:
        return await settings.ask_label(self._calls)

    async def check_version(self) -> None:
        """Raise EngineUnfit if it lacks the endpoints for RL; other EngineErrors where it does not answer yet."""
        await settings.ask_label(self._calls)

    def check_sampling(self, request: SampleRequest) -> None:
        if self._found is not None:
            wire.check_sampling(request, self._found.info.vocab_size)

    async def ready(self) -> bool:
        doing, within_s = "asking if it is ready", self.options.ready_timeout_s
        try:
            health = await self._http.call("GET", "/health", doing=doing, deadline_s=within_s, repeatable=False)
            paused = await self._http.call("GET", "/is_paused", doing=doing, deadline_s=within_s, repeatable=False)
        except EngineError:
            return False
        return health.status == paused.status == HTTPStatus.OK and paused.body == {"is_paused": False}

    async def load(self) -> EngineLoad:
        return await settings.ask_load(self._calls)

    async def was_restarted(self) -> bool:
        """See Engine. A fresh server has forgotten the label of what it loaded; one that had loaded nothing is known
        by its settings only.
        """
        found = self._found
        return found is not None and (
            await self.loaded_version() != self._weights.label or await settings.ask_start(self._calls) != found.start
        )

    # --- generation -------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[SampleRequest], *, deadline_s: float | None = None
    ) -> list[GeneratedSample]:
        """See Engine. One HTTP request for each sample: siblings meet in the server's prefix cache."""
        if not requests:
            return []
        allowed_s = self.options.generate_timeout_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + allowed_s
        found = await self._connected()
        check_requests(requests, found.info)
        for request in requests:
            self.check_sampling(request)
        async with self._flights.of(requests):
            sent = await self._flights.let_through(requests, deadline, allowed_s)
            if not sent:
                return [never_ran(request) for request in requests]
            answers = {r.rid: Answer(r, self._weights.label, self._say_decoding) for r in sent}
            try:
                await self._completions.fill(
                    answers, model=found.model, label=self._weights.label, deadline=deadline, allowed_s=allowed_s
                )
            except EngineError as error:
                arrived = [answer.sample() for answer in answers.values()]
                error.partial = tuple(s for s in arrived if len(s.output_ids) or s.unusable_tokens)
                raise
        samples = {rid: answer.sample() for rid, answer in answers.items()}
        if all(sample.fault for sample in samples.values()):
            raise EngineMalformed(self.address, f"generating {len(sent)} samples", next(iter(samples.values())).fault)
        return [samples.get(request.rid) or never_ran(request) for request in requests]

    async def abort(self, rids: Sequence[str]) -> None:
        """See Engine. Returns when they have ended."""
        await self._flights.give_up(rids)
        await self._completions.abort(rids)

    # --- weights ----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See Engine. Raises EngineUnfit for a mode that keeps requests."""
        if mode is not PauseMode.ABORT:
            raise EngineUnfit(
                self.address, f"pause mode {mode}: vLLM's completions do not name the weights of their tokens"
            )
        await self.info()
        gate = self._flights.gate
        was_open = gate.is_open
        gate.close()
        try:
            deadline_s = self.options.pause_abort_timeout_s
            await self._calls.post_ok("/pause?mode=abort", {}, f"pausing ({mode})", deadline_s=deadline_s)
            # One that is still on its way there would be held, and made by the next weights.
            sent = self._flights.sent()
            await self.abort(sorted(sent))
            await self._flights.until_ended(sent, ABORT_AGAIN_AFTER_S[-1])
        except BaseException:
            if was_open:
                await gate.open()
            raise

    async def resume(self) -> None:
        await self._calls.post_ok("/resume", {}, "resuming")
        await self._flights.gate.open()

    async def load_files(self, path: Path, version_label: str) -> None:
        """See Engine. `path` must mean the same to the server as it does here."""
        await self.info()
        await self._weights.load_files(path, version_label)

    async def load_tensors(self, path: Path, version_label: str) -> None:
        """Raise EngineLoadFailed: not offered."""
        raise self._weights.failed(str(path), version_label, _NOT_OFFERED, kept=True)

    async def load_adapter(self, path: Path, version_label: str) -> None:
        """Raise EngineLoadFailed: not offered."""
        raise self._weights.failed(str(path), version_label, "adapters go to SGLang alone", kept=True)

    async def drop_adapter(self) -> None:
        """See Engine. There is none."""

    async def check_tensors(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise EngineLoadFailed: not offered."""
        raise self._weights.failed(f"a broadcast of {len(tensors)} tensors", "to come", _NOT_OFFERED, kept=True)

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:  # noqa: ARG002 - the port's
        """Raise EngineLoadFailed: not offered."""
        raise self._weights.failed(f"process group {process_group.group_name}", "to come", _NOT_OFFERED, kept=True)

    async def leave_group(self, group_name: str) -> None:
        """See Engine. It is a member of none."""

    async def receive(
        self,
        tensors: Sequence[TensorSpec],
        *,
        buckets: Sequence[int] = (),  # noqa: ARG002 - the port's
        group_name: str,
        version_label: str,
        deadline_s: float,  # noqa: ARG002 - the port's
    ) -> None:
        """Raise EngineLoadFailed: not offered."""
        source = f"{len(tensors)} tensors of process group {group_name}"
        raise self._weights.failed(source, version_label, _NOT_OFFERED, kept=True)

    async def close(self) -> None:
        if live := self._flights.live:
            await self._flights.gate.give_up(live)
            await self._completions.abort(self._flights.sent())
        await self._http.close()
