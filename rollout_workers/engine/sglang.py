"""SglangEngine: a running SGLang server as an Engine, over its native HTTP interface. Seen working with SGLang 0.5.23.

The server's habits that shape this file; each is a requirement, with a test:
- A token id outside the vocabulary ends the whole process, so every request is checked first (requests.py). The
  vocabulary is asked of the server: /server_info does not tell it, but the refusal of an impossible token id does.
- A weight update that answers 400 may have been applied: "Weights were updated, but the cache was not flushed" leaves
  new weights under the old label. Relabelled and verified, it is a success.
- flush_cache fails while requests sit in place, so an in_place pause loads without it. The prefix cache then still
  holds keys and values of the old weights; extra_key = label keeps new requests from building on them.
- Files that are cut short or of another shape end the process, missing tensors keep their old values: the headers are
  checked before the server is told (weight_files.py).
- /update_weight_version aborts everything unless told not to.
- /health generates a token, and asked during a pause it marks the server unhealthy: /ready is polled instead.
- Abort matches by prefix (ids have one length), ignores ids that have not arrived yet (sent again until they end), and
  does nothing to requests held back by a pause (gate.py keeps them on our side).
- A plain request whose client leaves goes on for seconds: a cancelled `generate` aborts its requests itself.
- A paused server holds every /generate back, also one that it would refuse: what `info` needs is asked before a pause,
  and a server that somebody else left paused has to be resumed before anything.
- A pause in mode abort looks for running requests once a second: aborting them first saves that second.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_wire.errors import InvalidField
from rollout_workers.engine import sglang_wire, weight_files
from rollout_workers.engine.errors import (
    EngineError,
    EngineLoadFailed,
    EngineMalformed,
    EngineRejected,
    EngineTimeout,
)
from rollout_workers.engine.gate import Gate
from rollout_workers.engine.http import HttpConnection, Reply
from rollout_workers.engine.requests import check_requests, never_ran
from rollout_workers.engine.types import EngineInfo, GeneratedSample, PauseMode, SampleRequest

_APPLIED_WITHOUT_FLUSH = "Weights were updated, but the cache was not flushed"
# SGLang says this before it has touched a tensor; any other refusal may come from the middle of a load.
_REFUSED_BEFORE_LOADING = ("Failed to get weights iterator", "Failed to get model loader")
_IMPOSSIBLE_TOKEN_ID = 2**31 - 1
_VALID_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
_ABORT_AGAIN_AFTER_S = (0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Deadlines of the calls to one server, in seconds."""

    control_timeout_s: float = 15.0
    """Questions, resume, abort, and pauses that keep their requests."""
    pause_abort_timeout_s: float = 60.0
    """A pause that ends every request: SGLang answers when all are gone."""
    load_timeout_s: float = 120.0
    """A load; without a pause it waits for running requests first."""
    generate_timeout_s: float = 600.0
    """Default of `generate`."""
    abort_grace_s: float = 5.0
    """How long an aborted request may take to hand over what it has."""
    ready_timeout_s: float = 2.0
    reconnect_s: float = 5.0
    """An engine that refuses connections for so long is reported unavailable."""


class SglangEngine:
    """One SGLang server. Implements Engine.

    One event loop, one object per server: a second controller that pauses or loads behind its back is not noticed.
    `vocab_size` overrides what the server says. `headers` go with every call (an API key, say).
    """

    def __init__(
        self,
        base_url: str,
        *,
        options: SglangOptions | None = None,
        vocab_size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.options = options or SglangOptions()
        self._http = HttpConnection(base_url, reconnect_s=self.options.reconnect_s, headers=headers)
        self._known_vocab_size = vocab_size
        self._info: EngineInfo | None = None
        self._mask_max_tokens = sglang_wire.MASK_TOKENS_DEFAULT
        self._connecting = asyncio.Lock()
        self._gate = Gate()
        self._paused: PauseMode | None = None
        self._label = ""
        self._layout: weight_files.Layout | None = None
        self._live: set[str] = set()
        self._some_ended = asyncio.Condition()

    @property
    def address(self) -> str:
        """Base URL of the server."""
        return self._http.base_url

    # --- what the server says about itself --------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """See Engine. Asked of the server once."""
        async with self._connecting:
            if self._info is None:
                self._info = await self._connect()
        return self._info

    async def vocab_size(self) -> int:
        """See Engine."""
        return (await self.info()).vocab_size

    async def loaded_version(self) -> str:
        """See Engine."""
        return str((await self._get("/model_info", "asking for the loaded version"))["weight_version"])

    async def ready(self) -> bool:
        """See Engine."""
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

    async def _connect(self) -> EngineInfo:
        server = await self._get("/server_info", "asking for its settings")
        model = await self._get("/model_info", "asking for its model")
        models = await self._get("/v1/models", "asking for its context length")
        vocab_size = self._known_vocab_size or await self._ask_vocab_size()
        try:
            info = EngineInfo(
                name="sglang",
                version=str(server["version"]),
                address=self.address,
                model_path=str(model["model_path"]),
                vocab_size=vocab_size,
                max_input_tokens=int(server["max_req_input_len"]),
                context_length=int(models["data"][0]["max_model_len"]),
                max_running_requests=int(server["max_running_requests"] or 0),
            )
            self._mask_max_tokens = int(server.get("sampling_mask_max_tokens") or sglang_wire.MASK_TOKENS_DEFAULT)
            self._label = str(model["weight_version"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineMalformed(self.address, "asking for its settings", f"{type(error).__name__} {error}") from error
        # What it serves now is the measure for what it may load. On another machine the path means nothing here;
        # then the first load becomes the measure.
        with contextlib.suppress(weight_files.UnloadableWeights):
            self._layout = await asyncio.to_thread(weight_files.read_layout, Path(info.model_path))
        return info

    async def _ask_vocab_size(self) -> int:
        doing = "asking for its vocabulary"
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [_IMPOSSIBLE_TOKEN_ID],
        }
        reply = await self._post("/generate", body, doing)
        found = _VALID_RANGE.search(reply.message)
        if reply.status != 400 or found is None:
            raise EngineMalformed(self.address, doing, f"status {reply.status}: {reply.message}")
        return int(found[1])

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
        rids = {request.rid for request in requests}
        if rids & self._live:
            raise InvalidField("rid", min(rids & self._live), "unique among the requests in flight")
        self._live |= rids
        try:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    given_up = await self._gate.pass_through(rids)
            except TimeoutError as error:
                raise EngineTimeout(self.address, "waiting for it to be resumed", allowed_s) from error
            sent = [request for request in requests if request.rid not in given_up]
            done = await self._generate(sent, deadline, allowed_s) if sent else []
        finally:
            self._live -= rids
            async with self._some_ended:
                self._some_ended.notify_all()
        by_rid = {sample.rid: sample for sample in done}
        return [by_rid.get(request.rid) or never_ran(request) for request in requests]

    async def _generate(
        self, requests: Sequence[SampleRequest], deadline: float, allowed_s: float
    ) -> list[GeneratedSample]:
        info = await self.info()
        doing = f"generating {len(requests)} samples"
        body = sglang_wire.generate_body(
            requests, vocab_size=info.vocab_size, mask_max_tokens=self._mask_max_tokens, cache_key=self._label
        )
        rids = [request.rid for request in requests]
        grace_s = self.options.abort_grace_s
        # In a task of its own, because it has to outlive the deadline: an aborted request still hands over its tokens.
        post = asyncio.create_task(
            self._http.call(
                "POST",
                "/generate",
                body,
                doing=doing,
                deadline_s=deadline - time.monotonic() + 2 * grace_s,
                repeatable=False,  # the first attempt may be running under the same ids
            )
        )
        try:
            await asyncio.wait({post}, timeout=deadline - time.monotonic())
            if not post.done():
                await self._abort_quietly(rids)
                await asyncio.wait({post}, timeout=grace_s)
            if not post.done():
                raise EngineTimeout(self.address, doing, allowed_s)
            reply = post.result()
            if reply.status != 200:
                raise EngineRejected(self.address, doing, reply.status, reply.message)
            return sglang_wire.parse_reply(reply.body, requests, vocab_size=info.vocab_size)
        except sglang_wire.Malformed as error:
            raise EngineMalformed(self.address, doing, str(error)) from error
        except (asyncio.CancelledError, EngineError):
            # Of a batch that was refused, or that nobody waits for any more, parts may still run.
            await self._abort_quietly(rids)
            raise
        finally:
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    async def abort(self, rids: Sequence[str]) -> None:
        """See Engine. Returns when they have ended, or after a second of trying."""
        await self._gate.give_up(rids)
        for again_after_s in _ABORT_AGAIN_AFTER_S:
            live = self._live.intersection(rids) - self._gate.waiting
            if not live:
                return
            async with asyncio.TaskGroup() as group:
                for rid in live:
                    group.create_task(self._post_ok("/abort_request", {"rid": rid}, "aborting a request"))
            await self._wait_until_ended(live, again_after_s)

    async def _abort_quietly(self, rids: Sequence[str]) -> None:
        """Abort on the way out of a failed call, whose own error matters more, and which may be being cancelled."""
        calls = [self._post_ok("/abort_request", {"rid": rid}, "aborting a request", deadline_s=1.0) for rid in rids]
        await asyncio.shield(asyncio.gather(*calls, return_exceptions=True))

    async def _wait_until_ended(self, rids: set[str], within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._some_ended:
                await self._some_ended.wait_for(lambda: not rids & self._live)

    # --- weights ----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See Engine."""
        await self.info()  # a paused server answers none of the questions that need its tokenizer
        doing = f"pausing ({mode})"
        was_open = self._gate.is_open
        self._gate.close()
        deadline_s = self.options.control_timeout_s
        try:
            if mode is PauseMode.ABORT:
                deadline_s = self.options.pause_abort_timeout_s
                await self._post_ok("/abort_request", {"abort_all": True}, doing)
                await self._wait_until_ended(self._live - self._gate.waiting, _ABORT_AGAIN_AFTER_S[-1])
            await self._post_ok("/pause_generation", {"mode": str(mode)}, doing, deadline_s=deadline_s)
        except BaseException:
            if was_open:
                await self._gate.open()
            raise
        self._paused = mode

    async def resume(self) -> None:
        """See Engine."""
        await self._post_ok("/continue_generation", {}, "resuming")
        self._paused = None
        await self._gate.open()

    async def load_files(self, path: Path, version_label: str) -> None:
        """See Engine. `path` must mean the same to the server as it does here."""
        await self.info()
        try:
            where, layout = await asyncio.to_thread(lambda: (path.resolve(), weight_files.read_layout(path)))
            if self._layout is not None:
                weight_files.check_same_model(layout, self._layout)
        except weight_files.UnloadableWeights as error:
            raise self._load_failed(path, version_label, str(error), kept=True) from error
        doing = f"loading {version_label}"
        body = {
            "model_path": str(where),
            "weight_version": version_label,
            "load_format": "safetensors",  # never a pickle that happens to lie beside them
            "flush_cache": self._paused is not PauseMode.IN_PLACE,
            "abort_all_requests": False,
        }
        reply = await self._post("/update_weights_from_disk", body, doing, deadline_s=self.options.load_timeout_s)
        if reply.status == 400 and _APPLIED_WITHOUT_FLUSH in reply.message:
            relabel = {"new_version": version_label, "abort_all_requests": False}
            await self._post_ok("/update_weight_version", relabel, doing)
        elif reply.status != 200:
            untouched = reply.message.startswith(_REFUSED_BEFORE_LOADING)
            raise self._load_failed(path, version_label, reply.message, kept=untouched)
        reported = await self.loaded_version()
        if reported != version_label:
            raise self._load_failed(path, version_label, f"it reports {reported} afterwards", kept=False)
        self._label = version_label
        self._layout = layout if self._layout is None else self._layout

    def _load_failed(self, path: Path, version_label: str, cause: str, *, kept: bool) -> EngineLoadFailed:
        return EngineLoadFailed(
            self.address, str(path), version_label, cause=cause, weights="kept" if kept else "unknown"
        )

    # --- calls ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See Engine."""
        if self._live:
            await self._gate.give_up(self._live)
            await self._abort_quietly(sorted(self._live))
        await self._http.close()

    async def _get(self, path: str, doing: str) -> dict[str, Any]:
        reply = await self._http.call(
            "GET", path, doing=doing, deadline_s=self.options.control_timeout_s, repeatable=True
        )
        if reply.status != 200:
            raise EngineRejected(self.address, doing, reply.status, reply.message)
        if not isinstance(reply.body, dict):
            raise EngineMalformed(self.address, doing, f"no JSON object: {reply.message}")
        return reply.body

    async def _post(self, path: str, body: object, doing: str, *, deadline_s: float | None = None) -> Reply:
        """A control call. All of them may be made twice: they set a state, and do not step it."""
        allowed_s = self.options.control_timeout_s if deadline_s is None else deadline_s
        return await self._http.call("POST", path, body, doing=doing, deadline_s=allowed_s, repeatable=True)

    async def _post_ok(self, path: str, body: object, doing: str, *, deadline_s: float | None = None) -> None:
        reply = await self._post(path, body, doing, deadline_s=deadline_s)
        if reply.status != 200:
            raise EngineRejected(self.address, doing, reply.status, reply.message)
