"""Hosts of vLLM servers that run already."""

from functools import partial

from rollout_workers.engine import options as bounds
from rollout_workers.engine.hosts import RemoteHost, server_options
from rollout_workers.engine.options import HostOptions
from rollout_workers.engine.vllm.engine import VllmEngine


def check(options: HostOptions) -> None:
    bounds.check("sglang_version", options.sglang_version, lambda v: not v, "given together with SGLang servers")


def host_at(url: str, options: HostOptions) -> RemoteHost:
    return RemoteHost(url, options, partial(VllmEngine, options=server_options(options)))
