"""Hosts of SGLang servers: of servers that run already, and of servers that the worker starts."""

import asyncio
import contextlib
import os
import time

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineError, EngineUnavailable, EngineUnfit
from rollout_workers.engine.sglang.engine import SglangEngine, SglangOptions
from rollout_workers.engine.sglang.launch import SglangLauncher, SglangServerOptions
from rollout_workers.engine.types import Engine
from rollout_workers.options import LaunchOptions, WorkerOptions

_POLL_S = 0.25
_RESUME_S = 1.0


class RemoteHost:
    """Host of a server that somebody else runs."""

    ended = False
    why_ended = ""

    def __init__(self, url: str, options: WorkerOptions) -> None:
        self.base_model = options.base_model
        self._sglang = _sglang_options(options)
        self._engine = SglangEngine(url, options=self._sglang)
        self.url = url
        self._timeout_s = options.engine_timeout_s

    async def is_ready(self) -> bool:
        """True if the server could be opened at once. Raises EngineUnfit."""
        return await self._is_fit() and await self._engine.ready()

    async def open(self) -> Engine:
        """Wait until the server is ready."""
        deadline, checked = time.monotonic() + self._timeout_s, False
        while True:
            if not checked:
                # First: a server that is too old has no /ready.
                checked = await self._is_fit()
            if await self._engine.ready():
                break
            if time.monotonic() > deadline:
                raise EngineUnavailable(self.url, "starting", f"not ready after {self._timeout_s:g} s")
            # A worker that was killed in the middle of a load leaves a server that is paused: there, but not ready.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_RESUME_S):
                    await self._engine.resume()
            await asyncio.sleep(_POLL_S)
        return self._engine

    async def revive(self) -> Engine:
        """Look whether the server is there; one that was started anew is connected anew."""
        await self._is_fit()
        # A server that was left paused is there, but not ready: it is reached by going on.
        await self._engine.resume()
        if not await self._engine.ready():
            raise EngineUnavailable(self.url, "reconnecting", "not ready")
        if await self._engine.was_restarted():
            # Nothing that is known of the old one holds, its way to stream included; its calls have ended with it.
            old, self._engine = self._engine, SglangEngine(self.url, options=self._sglang)
            await old.close()
        return self._engine

    async def _is_fit(self) -> bool:
        """False while the server does not tell its version. Raises EngineUnfit when it is too old."""
        try:
            await self._engine.check_version()
        except EngineUnfit:
            raise
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Disconnect."""
        await self._engine.close()


class LaunchedHost:
    """Host of a server that the worker starts and ends."""

    def __init__(self, index: int, options: WorkerOptions) -> None:
        launch = options.launch
        if launch is None:
            raise TypeError("options.launch is not set")
        self.base_model: str | None = options.base_model or str(launch.model_path.absolute())
        self._sglang = _sglang_options(options)
        self._launcher = SglangLauncher(
            SglangServerOptions(
                python=launch.sglang_python,
                model_path=launch.model_path.absolute(),
                log_path=(launch.log_dir or options.weights_dir) / f"{options.worker_id}.e{index}.log",
                device=launch.device,
                gpus=_gpus(index, launch),
                extra_flags=launch.extra_flags,
                counts_as=options.sglang_version,
                ready_timeout_s=launch.ready_timeout_s,
            )
        )
        self._engine: SglangEngine | None = None

    @property
    def ended(self) -> bool:
        """True when the server's process has ended."""
        return self._launcher.returncode is not None

    @property
    def why_ended(self) -> str:
        """Exit code and the end of the log of a server that has ended."""
        launcher = self._launcher
        if launcher.returncode is None:
            return ""
        where = launcher.options.log_path
        return f"its process ended with exit code {launcher.returncode}; the end of {where}:\n{launcher.log_tail()}"

    async def open(self) -> Engine:
        """Start the server."""
        url = await self._launcher.start()
        self._engine = SglangEngine(url, options=self._sglang)
        return self._engine

    async def revive(self) -> Engine:
        """Start the server anew, whatever is left of it."""
        await self.close()
        return await self.open()

    async def close(self) -> None:
        """End the server."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        await self._launcher.stop()


def _gpus(index: int, launch: LaunchOptions) -> list[str] | None:
    """GPUs of one of several engines, out of those this process sees; None: all. Raises InvalidField for too few."""
    each = launch.gpus_per_engine
    if not each:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        # Numbers begin at 0 for whoever is given GPUs, as a container is.
        return [str(gpu) for gpu in range(index * each, (index + 1) * each)]
    share = visible.split(",")[index * each : (index + 1) * each]
    if len(share) < each:
        limit = f"engines x gpus_per_engine, {launch.engines * each} GPUs"
        raise InvalidField("CUDA_VISIBLE_DEVICES", visible, limit)
    return share


def _sglang_options(options: WorkerOptions) -> SglangOptions:
    return SglangOptions(
        generate_timeout_s=options.generate_timeout_s,
        load_timeout_s=options.reload_timeout_s,
        stream=options.stream,
        stream_interval=options.stream_interval,
        counts_as=options.sglang_version,
    )
