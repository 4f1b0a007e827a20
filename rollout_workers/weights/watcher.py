"""Knows the published weights and the planned ones: follows the service's watch stream and keeps the newest state.

The stream sends the present state first and may skip superseded ones, so a reconnect loses nothing.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Self

import grpc
import structlog

from buffer_wire.connection.retry import rpc_error
from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import Changes
from rollout_workers.service.client import BACKOFF, ServiceClient, on_whom, worth_waiting
from rollout_workers.versions import Version
from rollout_workers.weights.plans import Plan

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Published:
    """Weights to be loaded."""

    version: Version
    files: weights_pb2.FilesManifest | None
    """Manifest of the files; None for a version that comes without files."""
    by_value: bool = False
    """True when the files are handed to the engine as tensors."""
    is_adapter: bool = False
    """True when the files are an adapter onto the weights that the engine started with."""
    membership: int = 0
    """The process group in which they were broadcast; 0: they were not. Then `files` is the fallback."""

    @classmethod
    def of(cls, version: Version, manifest: weights_pb2.WeightManifest) -> Self:
        """Published weights of a version and its manifest, both from messages."""
        kind = manifest.WhichOneof("kind")
        if kind == "files":
            return cls(version, manifest.files)
        if kind == "tensors":
            return cls(version, manifest.tensors.files, by_value=True)
        if kind == "adapter":
            return cls(version, manifest.adapter.files, is_adapter=True)
        if kind == "collective":
            fallback = manifest.fallback if manifest.HasField("fallback") else None
            return cls(version, fallback, membership=manifest.collective.membership)
        return cls(version, None)

    @property
    def only_broadcast(self) -> bool:
        """True for weights that an engine which was no member cannot have."""
        return self.membership > 0 and self.files is None


class WeightWatcher:
    """The newest published weights; `changes` is notified when they change."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self.changes = Changes()
        self.latest: Published | None = None
        """Newest published weights; None until the service has answered for the first time."""
        self.plan: Plan | None = None
        """A collective update that is under way."""
        self.paused = False
        self.messages = 0
        """Number of states received so far. One that says nothing new may mean that another engine is back in
        service."""

    async def run(self) -> None:
        """Follow until cancelled. Raises RolloutBufferError when the service is gone for longer than its timeout."""
        delays, trouble_since = BACKOFF.delays(), float("inf")
        log = self._service.wait_log("watch the weights")
        while True:
            token = self._service.tokens.current
            stream = self._service.watch()
            try:
                async for reply in stream:
                    delays, trouble_since = BACKOFF.delays(), float("inf")
                    self._take(reply)
                error = None  # The service ended the stream in order, as when it drains.
            except grpc.RpcError as raised:
                error = rpc_error(raised)
            finally:
                stream.cancel()
            if error is not None:
                self._service.met(error)
                if self._service.renewed(error, token):
                    continue
                trouble_since = min(trouble_since, time.monotonic())
                if not worth_waiting(error) or time.monotonic() - trouble_since > self._service.timeout_s:
                    raise error
                log.say(on_whom(error, self._service.address), str(error))
            await asyncio.sleep(next(delays))

    def _take(self, reply: weights_pb2.WatchWeightsResponse) -> None:
        self._service.note(reply)
        self.messages += 1
        published = Published.of(Version.of(reply.published), reply.manifest)
        self.plan = Plan.of(reply.plan) if reply.HasField("plan") else None
        self.paused = reply.paused
        if published != self.latest:
            _log.info("published", version=published.version.label, with_files=published.files is not None)
            self.latest = published
        self.changes.notify()
