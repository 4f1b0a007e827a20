"""Kinds of engines that a worker can drive: one table, and what the folder of a kind has to offer.

A kind is a folder beside this file, and one line of the table. All that is asked of the folder is a module `hosts` with
the functions of KindHosts. It is imported when a worker's options name its kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from buffer_wire.errors import InvalidField
from rollout_workers.engine.hosts import EngineHost, RemoteHost
from rollout_workers.engine.options import HostOptions, Source
from rollout_workers.engine.types import PauseMode, PrefixCache


class KindHosts(Protocol):
    """Functions that the `hosts.py` of a kind defines; `host_at` where it has URLs, `own_hosts` where it has not."""

    def check(self, options: HostOptions) -> None:
        """Raise InvalidField for options that the kind does not know how to follow."""
        ...

    def host_at(self, url: str, options: HostOptions) -> RemoteHost:
        """Host of the server at `url`, which somebody else runs."""
        ...

    def own_hosts(self, options: HostOptions) -> Sequence[EngineHost]:
        """Hosts of the engines that the worker makes itself, as its options name them."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of engine, and what it can be asked for."""

    name: str
    """Name of the kind, and of its folder."""
    sources: tuple[Source, ...]
    pause_modes: tuple[PauseMode, ...] = tuple(PauseMode)
    prefix_caches: tuple[PrefixCache, ...] = tuple(PrefixCache)

    def check(self, options: HostOptions) -> None:
        """Raise InvalidField for what engines of this kind cannot do."""
        if options.source not in self.sources:
            can = ", ".join(kind.name for kind in _TABLE if options.source in kind.sources)
            raise InvalidField("engine_kind", self.name, f"{can} with {options.source}")
        if options.pause_mode not in self.pause_modes:
            raise InvalidField("pause_mode", options.pause_mode, f"{', '.join(self.pause_modes)} for {self.name}")
        if options.prefix_cache not in self.prefix_caches:
            raise InvalidField("prefix_cache", options.prefix_cache, f"{', '.join(self.prefix_caches)} for {self.name}")
        self.hosts.check(options)

    @property
    def hosts(self) -> KindHosts:
        """The functions of its `hosts.py`."""
        return cast("KindHosts", import_module(f"{__package__}.{self.name}.hosts"))


_TABLE = (
    Kind("sglang", ("url", "router", "launch")),
    Kind("simulated", ("simulate",)),
    Kind("vllm", ("url",), pause_modes=(PauseMode.ABORT,), prefix_caches=(PrefixCache.VERSION,)),
)
KINDS = {kind.name: kind for kind in _TABLE}
SERVERS = tuple(kind.name for kind in _TABLE if "url" in kind.sources)
"""Kinds that are servers, which can be named by URL."""
