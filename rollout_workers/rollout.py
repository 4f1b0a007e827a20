"""Single-turn generation: the samples of one group as one batched engine call, resumed until all are finished.

Finished samples are kept, partial ones go on with prompt + partial as input and what is left of max_new_tokens.
"""

import time

import numpy as np
import structlog

from rollout_workers.engine.types import GeneratedSample, SampleRequest
from rollout_workers.errors import GenerationFailed
from rollout_workers.prompts import check_prompt
from rollout_workers.samples import GroupProgress
from rollout_workers.slot import EngineSlot

_EMPTY_ROUNDS = 20
"""Engine calls in a row that may come back without a token: aborted in the queue by somebody else, or by a pause."""

_CATCH_UP_S = 60.0
"""How long partial work waits for an engine that is still behind the weights that began it."""

_log = structlog.get_logger()


class SingleTurn:
    """Generates one group on one engine. `stop` ends it early, with what there is."""

    def __init__(self, progress: GroupProgress, slot: EngineSlot, *, timeout_s: float) -> None:
        self.progress = progress
        self._slot = slot
        self._timeout_s = timeout_s
        self._stopped = False
        self._rids: list[str] = []

    async def run(self) -> bool:
        """True when all samples are finished, False when `stop` or a quarantine came first.

        Raises InvalidField (prompt or sampling), EngineError, GenerationFailed; `progress` then holds what is known.
        """
        deadline = time.monotonic() + self._timeout_s
        limit = check_prompt(self.progress.prompt_ids, self.progress.task, self._slot.info)
        await self._wait_for_weights()
        empty_rounds = 0
        while pending := self._requests(limit):
            if self._stopped or self._slot.quarantined:
                return False
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise GenerationFailed(
                    self.progress.lease.lease_id, f"{len(pending)} samples were not finished in {self._timeout_s:g} s"
                )
            before = self.progress.tokens
            self._rids = [request.rid for request in pending]
            try:
                done = await self._slot.engine.generate(pending, deadline_s=left_s)
            finally:
                self._rids = []
            self._take(done)
            empty_rounds = empty_rounds + 1 if self.progress.tokens == before else 0
            if empty_rounds >= _EMPTY_ROUNDS:
                why = f"{empty_rounds} engine calls in a row were aborted without a token"
                raise GenerationFailed(self.progress.lease.lease_id, why)
        return True

    async def stop(self) -> None:
        """End the engine's requests; `run` returns with what they have. Raises EngineError."""
        self._stopped = True
        self._slot.changes.notify()
        if self._rids:
            await self._slot.engine.abort(self._rids)

    def _requests(self, limit: int) -> list[SampleRequest]:
        """A request for each sample that goes on; one that has reached its limit is finished here."""
        sampling, prompt = self.progress.task.sampling, self.progress.prompt_ids
        requests = []
        for i in self.progress.unfinished:
            sample = self.progress.samples[i]
            if len(sample) >= limit or (len(sample) and len(prompt) + len(sample) > self._slot.info.max_input_tokens):
                sample.finish = "length"
                continue
            requests.append(
                SampleRequest(
                    sample_index=i,
                    input_ids=np.concatenate([prompt, sample.output_ids]) if len(sample) else prompt,
                    max_new_tokens=limit - len(sample),
                    temperature=_given(sampling.HasField("temperature"), sampling.temperature, 1.0),
                    top_p=_given(sampling.HasField("top_p"), sampling.top_p, 1.0),
                    top_k=sampling.top_k if sampling.HasField("top_k") else 0,
                    stop_token_ids=tuple(sampling.stop_token_ids),
                    stop=tuple(sampling.stop),
                )
            )
        return requests

    def _take(self, done: list[GeneratedSample]) -> None:
        for new in done:
            try:
                self.progress.samples[new.sample_index].append(new, self._slot.version_of)
            except ValueError as error:
                raise GenerationFailed(self.progress.lease.lease_id, f"sample {new.sample_index}: {error}") from error

    async def _wait_for_weights(self) -> None:
        """Versions within a sample must not fall: wait for the engine to catch up, or start those samples anew."""
        newest = self.progress.newest
        if newest is None or self._slot.loaded >= newest:
            return
        caught_up = await self._slot.changes.until(lambda: self._slot.loaded >= newest or self._stopped, _CATCH_UP_S)
        if not caught_up:
            for i in self.progress.unfinished:
                self.progress.samples[i].clear()
            _log.warning(
                "partial samples started anew",
                lease=self.progress.lease.lease_id,
                why=f"engine {self._slot.engine_id} stays at {self._slot.loaded}, they reach {newest}",
            )


def _given(present: bool, value: float, default: float) -> float:  # noqa: FBT001 - a field's presence
    # float32 on the wire: 0.7 arrives as 0.69999999, which is 0.7 to 7 digits.
    return float(f"{value:.7g}") if present else default
