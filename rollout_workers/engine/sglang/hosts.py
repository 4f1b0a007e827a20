"""Hosts of SGLang servers: of servers that run already, and of servers that the worker starts."""

import os
from dataclasses import replace
from functools import partial

from buffer_wire.errors import InvalidField
from rollout_workers.engine import options as bounds
from rollout_workers.engine.hosts import RemoteHost, server_options
from rollout_workers.engine.options import HostOptions, LaunchOptions
from rollout_workers.engine.sglang.engine import SglangEngine
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from rollout_workers.engine.sglang.versions import release_of
from rollout_workers.engine.types import Engine


def check(options: HostOptions) -> None:
    bounds.check("sglang_version", options.sglang_version, lambda v: not v or release_of(v) is not None, "as in 0.5.23")


def host_at(url: str, options: HostOptions) -> RemoteHost:
    return RemoteHost(url, options, partial(SglangEngine, options=server_options(options)))


def own_hosts(options: HostOptions) -> "list[LaunchedHost]":
    launch = options.launch
    return [LaunchedHost(i, options, launch) for i in range(launch.engines)] if launch is not None else []


class LaunchedHost:
    """Host of a server that the worker starts and ends."""

    def __init__(self, index: int, options: HostOptions, launch: LaunchOptions) -> None:
        self.base_model: str | None = options.base_model or str(launch.model_path.absolute())
        self._options = replace(server_options(options), sees_files=True)
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
        self._engine = SglangEngine(url, options=self._options)
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
