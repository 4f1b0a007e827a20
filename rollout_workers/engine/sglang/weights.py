"""The weights of one SGLang server: how new ones get in, and which it holds. Seen working with SGLang 0.5.23.

The server's habits that shape this file; each is a requirement, with a test:
- A weight update that answers 400 may have been applied: "Weights were updated, but the cache was not flushed" leaves
  new weights under the old label. Relabelled and verified, it is a success.
- flush_cache fails while requests sit in place, so an in_place pause loads without it. The prefix cache then still
  holds keys and values of the old weights; extra_key = label keeps new requests from building on them. With
  prefix_cache GROUP, nothing is flushed, and extra_key is the label with which the group was begun.
- Files that are cut short or of another shape end the process, and so do tensors by value; missing tensors keep their
  old values: headers and announcements are checked before the server is told (weight_files.py).
- /update_weight_version aborts everything unless told not to.
- Tensors and broadcasts need an open session (/begin_weight_update), which outlives a failure and refuses a second one.
"""

import asyncio
import base64
import contextlib
import ipaddress
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import accumulate, pairwise
from pathlib import Path
from urllib.parse import urlsplit

from rollout_workers.engine import weight_files
from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineError, EngineLoadFailed, EngineMalformed, EngineTimeout
from rollout_workers.engine.http import Reply
from rollout_workers.engine.sglang import tensor_pickle
from rollout_workers.engine.sglang.group import SglangGroup
from rollout_workers.engine.types import PauseMode, PrefixCache, ProcessGroup, TensorSpec

MAX_TENSORS_BYTES = 512 << 20
"""Largest model that is handed over by value."""

_PIECE_BYTES = 32 << 20
"""Tensors of one request: in memory about six times, as values, pickle, base64 and request, here and there."""
_APPLIED_WITHOUT_FLUSH = "Weights were updated, but the cache was not flushed"
# SGLang says this before it has touched a tensor; any other refusal may come from the middle of a load.
_REFUSED_BEFORE_LOADING = ("Failed to get weights iterator", "Failed to get model loader", "Failed to receive weights")
_SESSION_IS_OPEN = "already open"


class SglangWeights:
    """Weights of one server: which ones it holds, and how it gets others. `paused` is set by whoever pauses it."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls
        self._group = SglangGroup(calls)
        self._layout: weight_files.Layout | None = None
        self._ranks = 1
        self._session_left_open = False
        self.label = ""
        """Label of the weights that the server generates with."""
        self.paused: PauseMode | None = None

    async def found(self, label: str, model_path: Path, *, ranks: int) -> None:
        """Note what the server holds when it is connected; `ranks`: the processes that share the model."""
        self.label = label
        self._ranks = ranks
        with contextlib.suppress(EngineError):
            # A worker that was killed in the middle may have left one open; that there is none is the rule.
            await self._calls.post("/end_weight_update", {}, "closing an update that was left open")
        # What it serves now is the measure for what it may load. On another machine the path means nothing here;
        # then the first load becomes the measure.
        with contextlib.suppress(weight_files.UnloadableWeights):
            self._layout = await asyncio.to_thread(weight_files.read_layout, model_path)

    @property
    def layout(self) -> weight_files.Layout | None:
        """Layout of the model that the server was started with, or of what it loaded first; None: nobody knows."""
        return self._layout

    async def loaded_version(self) -> str:
        """The label that the server reports."""
        doing = "asking for the loaded version"
        model = await self._calls.get("/model_info", doing)
        if "weight_version" not in model:
            raise EngineMalformed(self._calls.address, doing, f"no weight_version in {str(model)[:200]}")
        return str(model["weight_version"])

    async def checksums(self) -> dict[str, str]:
        """A checksum of every parameter, as the server names and holds it."""
        doing = "asking for checksums"
        reply = await self._calls.post("/weights_checker", {"action": "checksum"}, doing, deadline_s=60.0)
        ranks = reply.body.get("ranks") or reply.body.get("payload") or [] if isinstance(reply.body, dict) else []
        return {f"{i}/{name}": value for i, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    # --- from files -------------------------------------------------------------------------------------------

    async def load_files(self, path: Path, version_label: str) -> None:
        """See Engine. `path` must mean the same to the server as it does here."""
        found = await self._headers(path, version_label)
        where = await asyncio.to_thread(path.resolve)
        doing = f"loading {version_label}"
        await self._end_left_session(doing)
        body = {
            "model_path": str(where),
            "weight_version": version_label,
            "load_format": "safetensors",  # never a pickle that happens to lie beside them
            "flush_cache": self._flushes,
            "abort_all_requests": False,
        }
        load_s = self._calls.options.load_timeout_s
        reply = await self._calls.post("/update_weights_from_disk", body, doing, deadline_s=load_s)
        await self._settle(reply, str(path), version_label)
        await self._verify(str(path), version_label)
        self._took({tensor.name: tensor.shape for tensor in found}, version_label)

    async def load_tensors(self, path: Path, version_label: str) -> None:
        found = await self._headers(path, version_label)
        self._check_handover(path, version_label, found)
        doing = f"handing over {version_label}"
        deadline_at = time.monotonic() + self._calls.options.load_timeout_s
        pieces = list(_pieces(found))
        async with self._session(doing):
            for i, piece in enumerate(pieces):
                last = i == len(pieces) - 1
                try:
                    body = await asyncio.to_thread(self._tensors_body, piece, version_label if last else None)
                except (OSError, weight_files.UnloadableWeights) as error:
                    # They are gone, or another file is in their place.
                    raise self._failed(str(path), version_label, str(error), kept=i == 0) from error
                reply = await self._calls.post(
                    "/update_weights_from_tensor", body, doing, deadline_s=deadline_at - time.monotonic()
                )
                await self._settle(reply, str(path), version_label, touched=True)
        await self._verify(str(path), version_label)
        self._took({tensor.name: tensor.shape for tensor in found}, version_label)

    async def _headers(self, path: Path, version_label: str) -> list[weight_files.StoredTensor]:
        try:
            found = await asyncio.to_thread(weight_files.read_headers, path)
            if self._layout is not None:
                weight_files.check_same_model({tensor.name: tensor.shape for tensor in found}, self._layout)
        except weight_files.UnloadableWeights as error:
            raise self._failed(str(path), version_label, str(error), kept=True) from error
        return found

    def _check_handover(self, path: Path, version_label: str, found: Sequence[weight_files.StoredTensor]) -> None:
        why = ""
        total_bytes = sum(tensor.size_bytes for tensor in found)
        odd = next((tensor for tensor in found if tensor.dtype not in tensor_pickle.DTYPES), None)
        if not _is_loopback(self._calls.address):
            why = f"tensors are handed by value to engines on loopback only, and this one is {self._calls.address}"
        elif total_bytes > MAX_TENSORS_BYTES:
            why = f"{total_bytes} bytes of tensors; at most {MAX_TENSORS_BYTES} are handed over by value"
        elif odd is not None:
            why = f"{odd.name} has type {odd.dtype}; by value go {', '.join(tensor_pickle.DTYPES)}"
        if why:
            raise self._failed(str(path), version_label, why, kept=True)

    def _tensors_body(self, piece: Sequence[weight_files.StoredTensor], version_label: str | None) -> bytes:
        """Write the request as JSON, put together by hand, for the base64 text needs no escaping. Blocking."""
        values = (tensor_pickle.NamedValues(t.name, t.dtype, t.shape, t.read()) for t in piece)
        encoded = b'"' + base64.b64encode(tensor_pickle.pickled(values)) + b'"'
        label = b"null" if version_label is None else f'"{version_label}"'.encode()
        flush = b"true" if version_label is not None and self._flushes else b"false"
        shape = (
            b'{"load_format":"flattened_bucket","serialized_named_tensors":[%b],"weight_version":%b,"flush_cache":%b}'
        )
        return shape % (
            b",".join([encoded] * self._ranks),  # one for each rank, and each takes its own part of it
            label,
            flush,
        )

    # --- by broadcast -----------------------------------------------------------------------------------------

    def check_tensors(self, tensors: Sequence[TensorSpec]) -> None:
        why = ""
        if self._ranks != 1:
            why = f"it has {self._ranks} ranks; engines of one rank take part in collective updates"
        elif self._layout is not None:
            try:
                weight_files.check_same_model({tensor.name: tensor.shape for tensor in tensors}, self._layout)
            except weight_files.UnloadableWeights as error:
                why = str(error)
        if why:
            raise self._failed("a broadcast", "to come", why, kept=True)

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        await self._group.join(process_group, deadline_s=deadline_s)

    async def leave_group(self, group_name: str) -> None:
        await self._end_left_session("leaving a process group")
        await self._group.leave(group_name)

    async def receive(
        self,
        tensors: Sequence[TensorSpec],
        *,
        buckets: Sequence[int],
        group_name: str,
        version_label: str,
        deadline_s: float,
    ) -> None:
        source = f"process group {group_name}"
        doing = f"receiving {version_label}"
        deadline_at = time.monotonic() + deadline_s
        # SGLang receives all of a request before it touches its model.
        for_each_request = accumulate(buckets or [len(tensors)], initial=0)
        async with self._session(doing):
            for start, end in pairwise(for_each_request):
                last = end == len(tensors)
                reply = await self._calls.post(
                    "/update_weights_from_distributed",
                    {
                        "names": [tensor.name for tensor in tensors[start:end]],
                        "dtypes": [tensor.dtype for tensor in tensors[start:end]],
                        "shapes": [list(tensor.shape) for tensor in tensors[start:end]],
                        "load_format": "flattened_bucket" if buckets else None,
                        "group_name": group_name,
                        "weight_version": version_label if last else None,
                        "flush_cache": last and self._flushes,
                        "abort_all_requests": False,
                    },
                    doing,
                    deadline_s=deadline_at - time.monotonic(),
                    repeatable=False,  # the sender sends once
                )
                await self._settle(reply, source, version_label, touched=start > 0)
        await self._verify(source, version_label)
        self._took({tensor.name: tensor.shape for tensor in tensors}, version_label)

    # --- common to all ----------------------------------------------------------------------------------------

    @property
    def _flushes(self) -> bool:
        return self.paused is not PauseMode.IN_PLACE and self._calls.options.prefix_cache is PrefixCache.VERSION

    @asynccontextmanager
    async def _session(self, doing: str) -> AsyncIterator[None]:
        await self._end_left_session(doing)
        reply = await self._calls.post("/begin_weight_update", {}, doing)
        if reply.status == HTTPStatus.BAD_REQUEST and _SESSION_IS_OPEN in reply.message:
            # Of a worker that ended in the middle.
            await self._calls.post_ok("/end_weight_update", {}, doing)
            await self._calls.post_ok("/begin_weight_update", {}, doing)
        elif reply.status != HTTPStatus.OK:
            raise self._failed("tensors", doing, reply.message, kept=True)
        self._session_left_open = True
        try:
            yield
        except EngineTimeout:
            raise  # It is stuck, and would not answer this either.
        except BaseException:
            with contextlib.suppress(EngineError):
                await self._end_left_session(doing)
            raise
        await self._calls.post_ok("/end_weight_update", {}, doing)
        self._session_left_open = False

    async def _end_left_session(self, doing: str) -> None:
        """Close a session that a failure left open; that there is none is as good."""
        if self._session_left_open:
            await self._calls.post("/end_weight_update", {}, doing)
            self._session_left_open = False

    async def _settle(self, reply: Reply, source: str, version_label: str, *, touched: bool = False) -> None:
        """Turn a refusal into an error, unless it is one of those that come after the deed.

        `touched`: parts of the new weights may be in place already.
        """
        if reply.status == HTTPStatus.OK:
            return
        if reply.status == HTTPStatus.BAD_REQUEST and _APPLIED_WITHOUT_FLUSH in reply.message:
            relabel = {"new_version": version_label, "abort_all_requests": False}
            await self._calls.post_ok("/update_weight_version", relabel, f"naming {version_label}")
            return
        untouched = reply.message.startswith(_REFUSED_BEFORE_LOADING) and not touched
        raise self._failed(source, version_label, reply.message, kept=untouched)

    async def _verify(self, source: str, version_label: str) -> None:
        reported = await self.loaded_version()
        if reported != version_label:
            raise self._failed(source, version_label, f"it reports {reported} afterwards", kept=False)

    def _took(self, layout: weight_files.Layout, version_label: str) -> None:
        self.label = version_label
        self._layout = layout if self._layout is None else self._layout

    def _failed(self, source: str, version_label: str, cause: str, *, kept: bool) -> EngineLoadFailed:
        return EngineLoadFailed(
            self._calls.address, source, version_label, cause=cause, weights="kept" if kept else "unknown"
        )


def _pieces(tensors: Sequence[weight_files.StoredTensor]) -> Iterator[list[weight_files.StoredTensor]]:
    """Split the tensors, in order, into pieces of at most _PIECE_BYTES; a larger tensor is a piece of its own."""
    piece: list[weight_files.StoredTensor] = []
    for tensor in tensors:
        if piece and sum(t.size_bytes for t in piece) + tensor.size_bytes > _PIECE_BYTES:
            yield piece
            piece = []
        piece.append(tensor)
    if piece:
        yield piece


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
