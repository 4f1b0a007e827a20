"""Batched calls to SGLang's /generate, streamed or not: each is sent, watched until its deadline, and cleaned up after.

Invariants: what arrived of a call that fails is in its error (`partial`), as far as it was streamed; a call that nobody
waits for any more leaves nothing running in the server.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineError, EngineMalformed, EngineRejected, EngineTimeout, EngineUnavailable
from rollout_workers.engine.flights import Flights
from rollout_workers.engine.sglang.adapters import SglangAdapters
from rollout_workers.engine.sglang.generation import wire
from rollout_workers.engine.sglang.generation.columns import Malformed
from rollout_workers.engine.sglang.generation.stream import BatchStream, StreamRefused
from rollout_workers.engine.sglang.generation.wire import ServerSettings
from rollout_workers.engine.types import DecodingListener, GeneratedSample, PrefixCache, SampleRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one call: generated samples, and requests that were refused."""

    samples: list[GeneratedSample]
    refused: dict[str, StreamRefused] = field(default_factory=dict)
    """Requests that found no room, by id. Only of streams: a plain call is refused as a whole."""


class SglangGenerate:
    """Calls to the server behind `calls`; `label` says which weights are in force there, `adapters` which adapter on
    them, `on_decoding` as in Engine.
    """

    def __init__(
        self,
        calls: HttpCalls,
        flights: Flights,
        settings: ServerSettings,
        label: Callable[[], str],
        adapters: SglangAdapters,
        on_decoding: DecodingListener,
    ) -> None:
        self._calls = calls
        self._flights = flights
        self._settings = settings
        self._label = label
        self._adapters = adapters
        self._on_decoding = on_decoding
        self._cache = uuid.uuid4().hex[:8]
        """Beginning of all cache keys: what an earlier worker left bears labels of another run, perhaps."""

    def check_sampling(self, request: SampleRequest) -> None:
        wire.check_sampling(request, self._settings)

    async def call(self, requests: Sequence[SampleRequest], *, deadline: float, allowed_s: float) -> Answer:
        """Generate these; at `deadline` (monotonic) what runs is aborted and comes back as it is. Raises EngineError,
        InvalidField.
        """
        with self._adapters.use([request.rid for request in requests]) as adapter:
            pinned = wire.Pinned(adapter, self._label()) if adapter else None
            return await self._call(requests, pinned, deadline=deadline, allowed_s=allowed_s)

    async def _call(
        self, requests: Sequence[SampleRequest], pinned: wire.Pinned | None, *, deadline: float, allowed_s: float
    ) -> Answer:
        calls, settings = self._calls, self._settings
        doing = f"generating {len(requests)} samples"
        stream: BatchStream | None = None
        if calls.options.stream:
            stream = BatchStream(
                requests,
                vocab_size=settings.vocab_size,
                incremental=settings.incremental,
                label=self._in_force(pinned),
                on_decoding=self._on_decoding,
                experts=settings.experts,
                pinned=pinned,
            )
        answers = [stream] if stream is not None else []
        rids = [request.rid for request in requests]
        post = asyncio.create_task(self._post(requests, stream, pinned, doing, deadline))
        with self._flights.call(rids, answers) as given_up:
            try:
                # The post is a task of its own: it outlives the deadline, for an aborted request hands its tokens over.
                ends: set[asyncio.Future[Any]] = {post, given_up}
                await asyncio.wait(ends, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
                if given_up.done() and not post.done():
                    raise EngineUnavailable(calls.address, doing, given_up.result())
                if not post.done():
                    await self.abort_quietly(rids)
                    await asyncio.wait({post}, timeout=calls.options.abort_grace_s)
                if not post.done():
                    raise EngineTimeout(calls.address, doing, allowed_s)
                try:
                    return post.result()
                except Malformed as error:
                    raise EngineMalformed(calls.address, doing, str(error)) from error
            except asyncio.CancelledError:
                # At once: while the requests are being aborted its tokens would be counted twice.
                self._flights.cut_off(answers)
                await self.abort_quietly(rids)
                raise
            except EngineError as error:
                # Of a batch that was refused, or whose connection broke, parts may still run.
                await self.abort_quietly(rids)
                if stream is not None:
                    error.partial = tuple(s for s in stream.samples() if len(s.output_ids) or s.unusable_tokens)
                raise
            finally:
                post.cancel()
                if stream is not None:
                    stream.close()
                await asyncio.gather(post, return_exceptions=True)

    async def _post(
        self,
        requests: Sequence[SampleRequest],
        stream: BatchStream | None,
        pinned: wire.Pinned | None,
        doing: str,
        deadline: float,
    ) -> Answer:
        calls, settings = self._calls, self._settings
        body = wire.generate_body(
            requests,
            settings=settings,
            cache_keys=[self._cache_key(request, pinned) for request in requests],
            stream_interval=calls.options.stream_interval if stream is not None else None,
            cumulative=not settings.incremental,
        )
        if pinned is not None:
            body |= pinned.asked(requests)
        unseen = len(requests) if stream is None else 0
        if unseen:
            self._on_decoding(unseen)
        try:
            reply = await calls.http.call(
                "POST",
                "/generate",
                body,
                doing=doing,
                deadline_s=deadline - time.monotonic() + 2 * calls.options.abort_grace_s,
                repeatable=False,  # the first attempt may be running under the same ids
                on_data=None if stream is None else lambda data: stream.feed(data, self._in_force(pinned)),
            )
        except StreamRefused as refused:
            raise self._refusal(doing, refused.status, refused.message) from refused
        finally:
            if unseen:
                self._on_decoding(-unseen)
        if reply.status != 200:
            raise self._refusal(doing, reply.status, reply.message)
        if stream is None:
            return Answer(wire.parse_reply(reply.body, requests, settings, pinned))
        if not stream.done:
            raise EngineUnavailable(calls.address, doing, "it ended its stream before the end")
        samples, refused_ones = stream.samples(), stream.refused()
        if samples and all(sample.fault for sample in samples) and not refused_ones:
            raise Malformed(samples[0].fault)
        return Answer([sample for sample in samples if sample.rid not in refused_ones], refused_ones)

    def _in_force(self, pinned: wire.Pinned | None) -> str:
        return pinned.label if pinned is not None else self._label()

    def _refusal(self, doing: str, status: int, message: str) -> EngineError:
        """Error of a refused call. Without its adapter a server is another one than that which was given it."""
        if status == HTTPStatus.BAD_REQUEST and self._adapters.lost(message):
            return EngineUnavailable(self._calls.address, doing, f"it has lost its adapter: {message}")
        return EngineRejected(self._calls.address, doing, status, message)

    def _cache_key(self, request: SampleRequest, pinned: wire.Pinned | None) -> str:
        of_group = self._calls.options.prefix_cache is PrefixCache.GROUP
        label = request.begun_with if of_group and request.begun_with else self._in_force(pinned)
        return f"{self._cache}/{label}"

    async def abort_quietly(self, rids: Sequence[str]) -> None:
        """Abort on the way out of a failed call, whose own error matters more, and which may be being cancelled."""
        calls = [
            self._calls.post_ok("/abort_request", {"rid": rid}, "aborting a request", deadline_s=1.0) for rid in rids
        ]
        await asyncio.shield(asyncio.gather(*calls, return_exceptions=True))
