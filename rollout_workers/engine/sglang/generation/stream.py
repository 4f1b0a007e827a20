"""Reads SGLang's event stream of one batched /generate, and keeps every token as it arrives. No I/O.

What SGLang 0.5.23 sends, and what follows for this file:
- Events `data: {...}` of one sample each, told apart by `index` (the last key of an event), and `data: [DONE]` at the
  end. A sample's last event carries its finish reason and `weight_versions`, the exact spans; those before carry none.
- Log-probabilities come with their tokens, also those of the draw (`output_token_sampling_logprobs`).
- A server started with --incremental-streaming-output sends what is new. Any other sends everything again each time:
  of those events the last two are kept unread, and read when something depends on them, so the work stays linear.
- The server is asked for this setting when it is connected. A server that was started anew meanwhile, with the other
  setting, would have tokens left out or taken twice: `completion_tokens` gives it away.
- An event of 8,000 tokens takes 13 ms to parse. Whether it is the last (`finish_reason`, before the log-probabilities)
  and how many tokens there are (`completion_tokens`, behind them) is found without parsing. In a string, the quotes of
  such a name would be escaped.
- An abort may meet a request outside the running batch. Then an incremental stream repeats the last token and all
  log-probabilities, and any stream leaves the log-probabilities of the draw out: `completion_tokens` says what is new.
- A refusal of one request (503, the queue is full) is its last event, with HTTP status 200; one of the whole batch is
  an event with `error`.

Tokens whose sample has no last event (the server died) are attributed to a label all the same: one seen earlier than
that which was in force when the event before arrived. A server's events lag behind its weights by less than a reload.
So no token is said to be of newer weights than it is.
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_workers.engine.requests import never_ran, unusable
from rollout_workers.engine.sglang.generation import wire
from rollout_workers.engine.sglang.generation.columns import (
    EXPERTS,
    ExpertShape,
    Malformed,
    decoded,
    entries_of,
    first_position,
    lists_of,
)
from rollout_workers.engine.token_rows import Array
from rollout_workers.engine.types import DecodingListener, GeneratedSample, SampleRequest, VersionSpan, nobody_counts

_INDEX = re.compile(rb'"index":\s*(\d+)')
_COMPLETED = re.compile(rb'"completion_tokens":\s*(\d+)')
_FINISHED = re.compile(rb'"finish_reason":\s*\{')
_END_OF_EVENT = b"\n\n"
_DONE = b"[DONE]"
_BUSY = frozenset({429, 503})


class StreamRefused(Exception):
    """The server answered with an error in place of events."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class BatchStream:
    """The stream of one call: `feed` it, take `samples`, `close` it.

    `label` is that of the weights when the call was sent, `on_decoding` as in Engine. `pinned`: the adapter under which
    all of it runs.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        *,
        vocab_size: int,
        incremental: bool,
        label: str,
        on_decoding: DecodingListener = nobody_counts,
        experts: ExpertShape | None = None,
        pinned: wire.Pinned | None = None,
    ) -> None:
        self._pinned = pinned
        self._samples = [_SampleStream(request, vocab_size=vocab_size, incremental=incremental) for request in requests]
        self._labels = [label]
        self._on_decoding = on_decoding
        start = first_position(requests)
        self._start = start or 0
        self._experts = experts if start is not None else None
        self._rest = bytearray()
        self._searched = 0
        """Bytes of the rest in which there is no end of an event."""
        self.done = False
        """True once the server has said that the stream is complete."""

    def feed(self, data: bytes, label: str) -> None:
        """Take in what arrived while `label` was in force. Raises StreamRefused, Malformed."""
        if label != self._labels[-1]:
            self._labels.append(label)
        # An event with routed experts is up to hundreds of megabytes, and comes in thousands of pieces.
        self._rest += data
        if self._rest.find(_END_OF_EVENT, max(self._searched - 1, 0)) < 0:
            self._searched = len(self._rest)
            return
        cut = deque(self._cut_experts(self._experts)) if self._experts is not None else None
        *events, rest = bytes(self._rest).split(_END_OF_EVENT)
        self._rest, self._searched = bytearray(rest), len(rest)
        for event in events:
            body = event.strip().removeprefix(b"data:").strip()
            if body == _DONE:
                self.done = True
            elif body:
                self._take(body, cut.popleft() if cut and EXPERTS in body else None)

    def _cut_experts(self, shape: ExpertShape) -> Iterator[Array | Malformed]:
        """Routed experts of the events that are complete, in order, taken out of what arrived; or what is wrong with
        them.
        """
        at, last = 0, self._rest.rfind(_END_OF_EVENT)
        while (at := self._rest.find(EXPERTS, at, last)) >= 0:
            at += len(EXPERTS)
            end = max(self._rest.find(b'"', at, last), at)
            with memoryview(self._rest) as whole, whole[at:end] as text:
                try:
                    experts: Array | Malformed = decoded(text, shape)
                except Malformed as error:
                    experts = error
            yield experts
            del self._rest[at:end]
            last -= end - at

    def _take(self, body: bytes, experts: Array | Malformed | None) -> None:
        index = _INDEX.search(body, max(body.rfind(b'"index"'), 0))
        if index is None or int(index[1]) >= len(self._samples):
            event = _parsed(body)
            error = event.get("error")
            if isinstance(error, dict):
                code = error.get("code")
                raise StreamRefused(code if isinstance(code, int) else 400, str(error.get("message", error)))
            raise Malformed(f"an event that belongs to no request: {body[:200].decode(errors='replace')}")
        sample = self._samples[int(index[1])]
        decoded = sample.decodes
        if isinstance(experts, Malformed):
            sample.faults.append(str(experts))
        elif experts is not None:
            sample.experts = experts[sample.request.experts_from - self._start :]
        sample.take(body, len(self._labels) - 1)
        if sample.decodes != decoded:
            self._on_decoding(1 if sample.decodes else -1)
        if not sample.decodes:
            sample.request.on_end()

    def close(self) -> None:
        """Close the stream, which is fed no more: samples without a last event decode no longer."""
        for sample in self._samples:
            if sample.decodes:
                sample.decodes = False
                self._on_decoding(-1)

    def samples(self) -> list[GeneratedSample]:
        """Samples of the requests, in order. In a stream that broke off, a sample without a last event counts as
        aborted, with what arrived of it. In a complete stream it breaks the contract.
        """
        return [sample.result(self._labels, complete=self.done, pinned=self._pinned) for sample in self._samples]

    @property
    def in_hand(self) -> int:
        """Tokens that have arrived. Cheap: no event is parsed for it."""
        return sum(sample.in_hand for sample in self._samples)

    def refused(self) -> dict[str, StreamRefused]:
        """Requests that the server had no room for, by id: they never ran, and can be sent again."""
        refusals = ((sample.request.rid, sample.refusal()) for sample in self._samples)
        return {rid: refusal for rid, refusal in refusals if refusal is not None}


class _SampleStream:
    """Event stream of one sample."""

    def __init__(self, request: SampleRequest, *, vocab_size: int, incremental: bool) -> None:
        self.request = request
        self.decodes = False
        """True from the first event to the last."""
        self._narrowed = wire.with_mask(request, vocab_size)
        self._incremental = incremental
        self._ids: list[int] = []
        self._lists: dict[str, list[Any]] = {name: [] for name in lists_of(request, narrowed=self._narrowed)}
        """Lists with an entry a token, by their names in meta_info; the first is that of log-probabilities."""
        self._logprobs = next(iter(self._lists.values()))
        self.experts: Array | None = None
        """Routed experts, which come with the last event."""
        self._meta: dict[str, Any] = {}
        """`meta_info` of the newest event that was read."""
        self._unread: list[bytes] = []
        """The last events of a cumulative stream, two at most."""
        self.faults: list[str] = []
        """Reasons why what arrived cannot be used."""
        self._seen_label = 0
        """Place in the batch's labels of the one that was in force when the last event arrived."""
        self._label = 0
        """Place in the batch's labels of the label for tokens that have no span yet."""
        self._spans: list[tuple[int, int]] = []
        """(label, end): tokens from the last end to this one, by place in the batch's labels."""

    def take(self, body: bytes, seen_label: int) -> None:
        """Take one event, which arrived under the label at place `seen_label`."""
        self.decodes = _FINISHED.match(body, max(body.find(b'"finish_reason"'), 0)) is None
        label = max(self._seen_label - 1, 0)
        self._seen_label = seen_label
        if label != self._label:
            self._read()
            self._spans.append((self._label, len(self._ids)))
            self._label = label
        self._unread = [*self._unread[-1:], body]
        if self._incremental:
            self._read()

    def _read(self) -> None:
        """Take in the events that are unread."""
        unread, self._unread = self._unread, []
        if not self._narrowed:
            unread = unread[-1:]
        for body in unread:
            try:
                self._absorb(_parsed(body))
            except wire.ODD as error:
                self.faults.append(wire.fault_of(error))

    def _absorb(self, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        if meta["id"] != self.request.rid:
            raise Malformed(f"an answer to {meta['id']} in place of {self.request.rid}")
        self._meta = meta
        ids = event["output_ids"]
        if self._incremental:
            new = meta.get("completion_tokens", len(self._ids) + len(ids)) - len(self._ids)
            if new > len(ids) or (0 < new < len(ids) and not self._repeats_last(ids, new)):
                raise Malformed(f"{len(ids)} tokens where {new} were missing")
            self._ids += ids[: max(new, 0)]
            for name, known in self._lists.items():
                known.extend(entries_of(meta, name, 0, max(new, 0)))
        else:
            # More than it says are in an event that was being written when the next ones came.
            if meta.get("completion_tokens", 0) > len(ids):
                raise Malformed(f"{len(ids)} tokens where all {meta['completion_tokens']} were due")
            self._ids += ids[len(self._ids) :]
            for name, known in self._lists.items():
                known.extend(entries_of(meta, name, len(known)))

    def _repeats_last(self, ids: list[int], new: int) -> bool:
        """True for an abort outside the running batch that was sent in one event with the `new` tokens before it."""
        aborted = (self._finish or {}).get("type") == "abort"
        return aborted and len(ids) == new + 1 and ids[new] == ids[new - 1]

    @property
    def _finish(self) -> dict[str, Any] | None:
        finish = self._meta.get("finish_reason")
        return finish if isinstance(finish, dict) else None

    @property
    def in_hand(self) -> int:
        """Tokens that have arrived, by what the newest event says."""
        if not self._unread:
            return self.received
        newest = self._unread[-1]
        found = _COMPLETED.match(newest, max(newest.rfind(b'"completion_tokens"'), 0))
        return int(found[1]) if found is not None else self.received

    @property
    def received(self) -> int:
        """Tokens that have arrived, counted in the events themselves."""
        self._read()
        return max(len(self._ids), len(self._logprobs))

    def refusal(self) -> StreamRefused | None:
        self._read()
        status = (self._finish or {}).get("status_code")
        if self._ids or not isinstance(status, int) or status not in _BUSY:
            return None
        return StreamRefused(status, str((self._finish or {}).get("message", "")))

    def result(self, labels: Sequence[str], *, complete: bool, pinned: wire.Pinned | None = None) -> GeneratedSample:
        received = self.received
        if self.faults:
            return unusable(self.request, self.faults[0], received=received)
        finish = self._finish
        if finish is not None and finish.get("status_code") and not self._ids:
            return unusable(self.request, f"refused with status {finish['status_code']}: {finish.get('message')}")
        if complete and finish is None:
            return unusable(self.request, "the stream ended without its last event", received=received)
        if not received and finish is None:
            return never_ran(self.request)
        meta = {**self._meta, "finish_reason": finish or {"type": "abort"}}
        spans = None
        if meta["finish_reason"].get("type") == "abort" and not meta.get("weight_versions"):
            spans = self._spans_seen(labels, min(len(self._ids), len(self._logprobs)))
        try:
            return wire.make_sample(
                self.request, self._ids, self._lists, meta, experts=self.experts, spans=spans, pinned=pinned
            )
        except wire.ODD as error:
            return unusable(self.request, wire.fault_of(error), received=received)

    def _spans_seen(self, labels: Sequence[str], length: int) -> tuple[VersionSpan, ...]:
        """Spans over [0, length) by what was seen, and never newer than the truth."""
        spans: list[VersionSpan] = []
        for label, end in [*self._spans, (self._label, length)]:
            start, end = (spans[-1].end if spans else 0), min(end, length)  # noqa: PLW2901
            if end <= start:
                continue
            if spans and spans[-1].version_label == labels[label]:
                spans[-1] = VersionSpan(labels[label], spans[-1].start, end)
            else:
                spans.append(VersionSpan(labels[label], start, end))
        return tuple(spans)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        event = json.loads(body)
    except ValueError as error:
        raise Malformed(f"an event that is no JSON: {body[:200].decode(errors='replace')}") from error
    if not isinstance(event, dict):
        raise Malformed(f"an event that is no object: {body[:200].decode(errors='replace')}")
    return event
