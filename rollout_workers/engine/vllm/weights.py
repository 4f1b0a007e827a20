"""The weights of one vLLM server: from files alone, by its own loader.

- /collective_rpc has every rank load a path (`reload_weights`). What it answers says nothing of the weights. An error
  may come from the middle of a load.
- The label is what the worker sets (/update_weight_version); vLLM knows no other. While a load is under way it is
  that of no update: a worker that is killed then leaves none that could be taken for a version.
- vLLM's broadcasts (--weight-transfer-config) meet in a group of its own kind, whose sender is vLLM's trainer engine.
  By value it takes CUDA handles of the same machine. Neither is what publishers of this project send.
"""

import asyncio
import contextlib
from http import HTTPStatus
from pathlib import Path

from rollout_workers.engine import weight_files
from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineLoadFailed
from rollout_workers.engine.vllm import settings
from rollout_workers.versions import BASE

LOADING = BASE.label
"""Label of a server that takes new weights: under it a server is never taken to hold what a trainer has published."""


class VllmWeights:
    """Weights of one server."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls
        self._layout: weight_files.Layout | None = None
        self.label = ""
        """Label of the weights that the server generates with."""

    async def found(self, label: str, model_path: Path) -> None:
        """Note what the server holds when it is connected: the measure for what it may load."""
        self.label = label
        with contextlib.suppress(weight_files.UnloadableWeights):
            self._layout = await asyncio.to_thread(weight_files.read_layout, model_path)

    async def load_files(self, path: Path, version_label: str) -> None:
        """See Engine. `path` must mean the same to the server as it does here."""
        try:
            layout = await asyncio.to_thread(weight_files.read_layout, path)
            if self._layout is not None:
                weight_files.check_same_model(layout, self._layout)
        except weight_files.UnloadableWeights as error:
            raise self.failed(str(path), version_label, str(error), kept=True) from error
        where = str(await asyncio.to_thread(path.resolve))
        doing = f"loading {version_label}"
        before = self.label
        await self._name(LOADING)
        body = {"method": "reload_weights", "kwargs": {"weights_path": where, "is_checkpoint_format": True}}
        load_s = self._calls.options.load_timeout_s
        reply = await self._calls.post("/collective_rpc", body, doing, deadline_s=load_s, repeatable=False)
        if reply.status == HTTPStatus.NOT_FOUND:
            await self._name(before)
        if reply.status != HTTPStatus.OK:
            raise self.failed(str(path), version_label, reply.message, kept=reply.status == HTTPStatus.NOT_FOUND)
        await self._name(version_label)
        if (reported := await settings.ask_label(self._calls)) != version_label:
            raise self.failed(str(path), version_label, f"it reports {reported} afterwards", kept=False)
        self._layout = self._layout or layout

    async def _name(self, label: str) -> None:
        await self._calls.post_ok("/update_weight_version", {"new_version": label}, f"naming {label}")
        self.label = label

    def failed(self, source: str, version_label: str, cause: str, *, kept: bool) -> EngineLoadFailed:
        """Error of a load; `kept`: the old weights are in place."""
        return EngineLoadFailed(
            self._calls.address, source, version_label, cause=cause, weights="kept" if kept else "unknown"
        )
