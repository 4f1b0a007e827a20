"""The answer to one completion, as it arrives: tokens, log-probabilities, and how it ended. No I/O."""

import json
from typing import Any

import numpy as np

from buffer_wire.engine_columns import SAMPLING_MASK
from rollout_workers.engine.requests import never_ran, unusable
from rollout_workers.engine.token_rows import TokenRows
from rollout_workers.engine.types import DecodingListener, FinishReason, GeneratedSample, SampleRequest, VersionSpan

_END_OF_EVENT = b"\n\n"
_DONE = b"[DONE]"
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_ODD = (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError)
"""Errors that reading an answer of another form can raise."""


class Refused(Exception):
    """The server answered with an error in place of an event."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Answer:
    """Answer to `request`, made by the weights `label`: `feed` it or `take` the whole, then take the `sample`."""

    def __init__(self, request: SampleRequest, label: str, on_decoding: DecodingListener) -> None:
        self.request = request
        self._label = label
        self._on_decoding = on_decoding
        self._decodes = False
        self._rest = b""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: str | None = None
        self._counted: int | None = None
        self._fault = ""
        self.complete = False
        """True once the server has said that nothing more comes."""

    @property
    def in_hand(self) -> int:
        """Tokens that have arrived."""
        return max(len(self._ids), len(self._logprobs))

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of a stream, cut anywhere. Raises Refused for an event that is the server's error.

        An event that cannot be read raises nothing: it is the `fault` of the sample.
        """
        *events, self._rest = (self._rest + data).split(_END_OF_EVENT)
        for event in events:
            body = event.strip().removeprefix(b"data:").strip()
            if body == _DONE:
                self.complete = True
                self.decode(on=False)
                self.request.on_end()
            elif body:
                self._read(body)

    def take(self, reply: object) -> None:
        """Take in an answer that came as a whole. Raises Refused."""
        self.complete = True
        self._read(reply)

    def decode(self, *, on: bool) -> None:
        """Note that the request decodes, or does so no longer."""
        if on is not self._decodes:
            self._decodes = on
            self._on_decoding(1 if on else -1)

    def _read(self, event: object) -> None:
        try:
            self._absorb(json.loads(event) if isinstance(event, bytes) else event)
        except _ODD as error:
            self._fault = self._fault or f"{type(error).__name__}: {error}"

    def _absorb(self, event: Any) -> None:  # noqa: ANN401 - whatever the server sent
        if error := event.get("error"):
            raise Refused(int(error.get("code") or 500), str(error.get("message", error)))
        if usage := event.get("usage"):
            self._counted = int(usage["completion_tokens"])
        for choice in event["choices"]:
            self._ids += choice["token_ids"] or ()
            self._logprobs += (choice["logprobs"] or {}).get("token_logprobs", ())
            self._finish = choice["finish_reason"] or self._finish
            self.decode(on=not self.complete and self._finish is None)

    def sample(self) -> GeneratedSample:
        """Sample of what has arrived. One without an end counts as aborted; one that breaks the contract has a
        `fault`.
        """
        request = self.request
        fault = self._fault or (self._fault_of_end() if self.complete else "")
        if fault:
            return unusable(request, fault, received=self.in_hand)
        if not self.in_hand and self._finish is None:
            return never_ran(request)
        kept = min(len(self._ids), len(self._logprobs))
        try:
            ids = np.asarray(self._ids[:kept], dtype=np.int32)
            logprobs = np.asarray(self._logprobs[:kept], dtype=np.float32)
        except _ODD as error:
            return unusable(request, f"{type(error).__name__}: {error}", received=self.in_hand)
        if not np.isfinite(logprobs).all():
            return unusable(request, "a log-probability that is not finite", received=self.in_hand)
        return GeneratedSample(
            rid=request.rid,
            sample_index=request.sample_index,
            output_ids=ids,
            logprobs=np.zeros_like(logprobs) if request.temperature == 0 else logprobs,
            spans=(VersionSpan(self._label, 0, kept),) if kept else (),
            finish_reason=_FINISH_REASONS[self._finish or "abort"] if self.complete else "abort",
            columns={SAMPLING_MASK: TokenRows.none_for(kept)} if SAMPLING_MASK in request.columns else {},
            unusable_tokens=self.in_hand - kept,
        )

    def _fault_of_end(self) -> str:
        """Fault of an answer that is complete; empty when it has none."""
        if self._finish not in _FINISH_REASONS:
            return f"finish reason {self._finish!r}"
        if len(self._ids) != len(self._logprobs):
            return f"{len(self._logprobs)} log-probabilities for {len(self._ids)} tokens"
        if self._counted is not None and self._counted != len(self._ids):
            return f"{len(self._ids)} tokens, and {self._counted} by its own count"
        if self._finish == "length" and len(self._ids) < (most := self.request.max_new_tokens):
            return f"cut off after {len(self._ids)} of {most} tokens: its generation config has a max_new_tokens"
        return ""
