"""Completions of one vLLM server: each is sent, watched until its deadline, and cleaned up after.

Invariant: a call that nobody waits for any more leaves nothing running in the server, which aborts a request whose
connection closes.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import Any

from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from rollout_workers.engine.flights import Flights
from rollout_workers.engine.vllm import wire
from rollout_workers.engine.vllm.answer import Answer, Refused

ABORT_AGAIN_AFTER_S = (0.05, 0.2, 0.5)


class VllmCompletions:
    """Completions under way at the server behind `calls`."""

    def __init__(self, calls: HttpCalls, flights: Flights) -> None:
        self._calls = calls
        self._flights = flights
        self._posts: dict[str, asyncio.Task[None]] = {}
        """Calls under way, by request id."""

    async def fill(
        self, answers: dict[str, Answer], *, model: str, label: str, deadline: float, allowed_s: float
    ) -> None:
        """Have the answers filled, or ended by an abort; at `deadline` (monotonic) what runs is aborted.

        `label`: that of the weights in force. Raises EngineError; what has arrived by then is in the answers.
        """
        doing = f"generating {len(answers)} samples"
        posts = {
            rid: asyncio.create_task(self._post(answer, model, label, deadline)) for rid, answer in answers.items()
        }
        self._posts |= posts
        with self._flights.call(answers, answers.values()) as gone:
            done = asyncio.create_task(asyncio.wait(posts.values(), return_when=asyncio.FIRST_EXCEPTION))
            try:
                ends: set[asyncio.Future[Any]] = {done, gone}
                await asyncio.wait(ends, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
                _raise_first(posts.values())
                if gone.done():
                    raise EngineUnavailable(self._calls.address, doing, gone.result())
                if late := {rid: post for rid, post in posts.items() if not post.done()}:
                    await self._tell_to_abort(late)
                    _, pending = await asyncio.wait(late.values(), timeout=self._calls.options.abort_grace_s)
                    if pending:
                        raise EngineTimeout(self._calls.address, doing, allowed_s)
                    _raise_first(late.values())
            except asyncio.CancelledError:
                self._flights.cut_off(answers.values())
                raise
            finally:
                done.cancel()
                for rid, answer in answers.items():
                    self._posts.pop(rid).cancel()  # The server aborts a request whose connection closes.
                    answer.decode(on=False)
                await asyncio.gather(done, *posts.values(), return_exceptions=True)

    async def _post(self, answer: Answer, model: str, label: str, deadline: float) -> None:
        options = self._calls.options
        stream, doing = options.stream, "generating a sample"
        body = wire.completion_body(
            answer.request,
            model=model,
            cache_salt=label or "-",
            stream_interval=options.stream_interval if stream else None,
        )
        answer.decode(on=not stream)
        try:
            reply = await self._calls.http.call(
                "POST",
                "/v1/completions",
                body,
                doing=doing,
                deadline_s=deadline - time.monotonic() + 2 * options.abort_grace_s,
                repeatable=False,  # the first attempt may be running under the same id
                on_data=answer.feed if stream else None,
            )
            if reply.status != HTTPStatus.OK:
                raise EngineRejected(self._calls.address, doing, reply.status, reply.message)
            if not stream:
                answer.take(reply.body)
        except Refused as refused:
            raise EngineRejected(self._calls.address, doing, refused.status, refused.message) from refused
        if not answer.complete:
            raise EngineUnavailable(self._calls.address, doing, "it ended its stream before the end")

    async def abort(self, rids: Collection[str]) -> None:
        """End these completions; what the server does not let go loses its connection."""
        posts = {rid: self._posts[rid] for rid in rids if rid in self._posts}
        for again_after_s in ABORT_AGAIN_AFTER_S:
            live = {rid: post for rid, post in posts.items() if not post.done()}
            if not live or not await self._tell_to_abort(live):
                break
            await asyncio.wait(live.values(), timeout=again_after_s)
        for post in posts.values():
            post.cancel()

    async def _tell_to_abort(self, rids: Collection[str]) -> bool:
        """False when the server refuses, or does not answer."""
        body = {"request_ids": [wire.external_id(rid) for rid in rids]}
        try:
            await self._calls.post_ok(
                "/abort_requests", body, "aborting requests", deadline_s=self._calls.options.abort_grace_s
            )
        except EngineError:
            return False
        return True


def _raise_first(posts: Iterable[asyncio.Task[None]]) -> None:
    """Raise the error of the first call that failed. One that was aborted has not."""
    for post in posts:
        if post.done() and not post.cancelled():
            post.result()
