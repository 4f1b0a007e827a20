"""LoRA adapters of one SGLang server: which it holds, what runs under each, and what new requests run under.

The server's habits that shape this file, read in the source of SGLang 0.5.23:
- /load_lora_adapter reads the files between two steps, and pauses nothing. A refusal (400) leaves all as it was.
- A name that is loaded, or whose unload did not finish, is refused: it is unloaded, and loaded once more.
- /unload_lora_adapter waits for the requests under the adapter, and every other load waits for it. So only what no
  request runs under is unloaded.
- Beyond --max-loaded-loras the server itself unloads what was used least recently, and waits for it: fewer are kept.
  Requests under more adapters than --max-loras-per-batch wait in its queue: no more than that are kept either.
- It refuses a request (400) under an adapter that it does not hold, as after a start anew.

Invariant: a request runs under one adapter from its start to its end.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineError, EngineLoadFailed, EngineRejected
from rollout_workers.engine.http import Reply
from rollout_workers.engine.sglang.adapter_files import check_adapter
from rollout_workers.engine.weight_files import Layout, UnloadableWeights
from rollout_workers.versions import Version

_LEAST = 2
"""Adapters that a server has to hold at once: the one in force, and the one that comes."""
_OF_THAT_NAME = ("already loaded", "already exists", "incomplete unload")
_UNKNOWN = "does not exist"
_NOT_HELD = ("has never been loaded", "are not loaded", "Failed to implicitly load")

End = Callable[[Sequence[str]], Awaitable[None]]
"""Function that ends requests, by their ids, with what they have."""


class SglangAdapters:
    """Adapters of the server behind `calls`."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls
        self._limit = 0
        self._held: dict[str, set[str]] = {}
        """Ids of the requests under each adapter that is loaded, by its label; the oldest first."""
        self.current = ""
        """Label of the adapter under which new requests run; empty: none."""

    @property
    def held(self) -> tuple[str, ...]:
        """Labels of the adapters that are loaded, the oldest first."""
        return tuple(self._held)

    @property
    def in_use(self) -> bool:
        """True while a request runs under an adapter."""
        return any(self._held.values())

    async def found(self, limit: int) -> None:
        """Note the most adapters that the server holds (0: it takes none), and unload what an earlier worker left."""
        self._limit = limit
        if limit:
            for name in await self._listed():
                if Version.parse(name) is not None:
                    with contextlib.suppress(EngineError):
                        await self._unload(name)

    async def is_held(self) -> bool:
        """True if the server says that it holds the adapter in force. Raises EngineError."""
        return self.current in await self._listed()

    @contextmanager
    def use(self, rids: Sequence[str]) -> Iterator[str]:
        """Have these requests run under the adapter in force until this ends; yields its label, empty without one."""
        label = self.current
        if not label:
            yield ""
            return
        self._held[label].update(rids)
        try:
            yield label
        finally:
            # Weights that were loaded meanwhile have taken its place in the books.
            self._held.get(label, set()).difference_update(rids)

    async def load(self, path: Path, label: str, *, model: Layout | None, end: End) -> None:
        """Load the adapter in `path` and put it in force. Raises EngineLoadFailed; what was in force stays."""
        if self._limit < _LEAST:
            flags = "--enable-lora, --max-lora-rank, --lora-target-modules"
            cause = f"it holds {self._limit} adapters at once, and {_LEAST} are needed: start it with {flags}"
            raise self._failed(path, label, f"{cause}, and --max-loras-per-batch of {_LEAST} or more")
        try:
            await asyncio.to_thread(check_adapter, path, model)
        except UnloadableWeights as error:
            raise self._failed(path, label, str(error)) from error
        if label == self.current and await self.is_held():
            return
        try:
            await self._make_room(path, label, end)
            reply = await self._post_load(path, label)
            if reply.status == HTTPStatus.BAD_REQUEST and any(sign in _said(reply) for sign in _OF_THAT_NAME):
                await self._unload(label)
                reply = await self._post_load(path, label)
        except EngineRejected as error:
            raise self._failed(path, label, str(error)) from error
        if reply.status != HTTPStatus.OK or not isinstance(reply.body, dict) or not reply.body.get("success"):
            raise self._failed(path, label, _said(reply))
        self._held.setdefault(label, set())
        self.current = label
        for idle in self._idle():
            with contextlib.suppress(EngineError):  # It is tried again at the next load.
                await self._unload(idle)

    def drop(self) -> None:
        """Have new requests run under no adapter. What is loaded is unloaded at the next load."""
        self.current = ""

    def lost(self, message: str) -> bool:
        """True if the server refuses a request because it does not hold the adapter."""
        return any(sign in message for sign in _NOT_HELD)

    async def _make_room(self, path: Path, label: str, end: End) -> None:
        """Unload until one more fits: first what nothing runs under, then the oldest, whose requests end early."""
        while len(self._held) >= self._limit:
            oldest = next(iter(self._idle()), None) or next(name for name in self._held if name != self.current)
            if rids := self._held[oldest]:
                await end(sorted(rids))
            if self._held[oldest]:
                raise self._failed(path, label, f"requests under {oldest} do not end, and it holds {self._limit}")
            await self._unload(oldest)

    def _idle(self) -> list[str]:
        return [name for name, rids in self._held.items() if not rids and name != self.current]

    async def _post_load(self, path: Path, label: str) -> Reply:
        where = await asyncio.to_thread(path.resolve)
        body = {"lora_name": label, "lora_path": str(where)}
        load_s = self._calls.options.load_timeout_s
        return await self._calls.post("/load_lora_adapter", body, f"loading adapter {label}", deadline_s=load_s)

    async def _unload(self, label: str) -> None:
        doing = f"unloading adapter {label}"
        reply = await self._calls.post("/unload_lora_adapter", {"lora_name": label}, doing)
        if reply.status != HTTPStatus.OK and _UNKNOWN not in _said(reply):
            raise EngineRejected(self._calls.address, doing, reply.status, _said(reply))
        self._held.pop(label, None)

    async def _listed(self) -> list[str]:
        models = await self._calls.get("/v1/models", "asking for its adapters")
        cards = models.get("data") or []
        return [str(card.get("id")) for card in cards if isinstance(card, dict) and card.get("parent")]

    def _failed(self, path: Path, label: str, cause: str) -> EngineLoadFailed:
        return EngineLoadFailed(self._calls.address, str(path), label, cause=cause, weights="kept")


def _said(reply: Reply) -> str:
    """Text of a refusal: of a load or an unload it is in a field of its own."""
    said = reply.body.get("error_message") if isinstance(reply.body, dict) else None
    return str(said)[:500] if said else reply.message
