"""Knows the published weights: follows the service's watch stream and keeps the newest state.

The stream sends the present state first and may skip superseded ones, so a reconnect loses nothing.
"""

import asyncio
import time
from dataclasses import dataclass

import grpc
import structlog

from buffer_wire.retry import rpc_error
from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import Changes
from rollout_workers.service import BACKOFF, ServiceClient, on_whom, worth_waiting
from rollout_workers.versions import Version

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Published:
    """Weights to be loaded. `files` is None for a version that comes without files."""

    version: Version
    files: weights_pb2.FilesManifest | None


class WeightWatcher:
    """The newest published weights; `changes` is notified when they change."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self.changes = Changes()
        self.latest: Published | None = None
        """None until the service has answered for the first time."""
        self.paused = False

    async def run(self) -> None:
        """Follow until cancelled. Raises RolloutBufferError when the service is gone for longer than its timeout."""
        delays, trouble_since = BACKOFF.delays(), float("inf")
        log = self._service.wait_log("watch the weights")
        while True:
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
                trouble_since = min(trouble_since, time.monotonic())
                if not worth_waiting(error) or time.monotonic() - trouble_since > self._service.timeout_s:
                    raise error
                log.say(on_whom(error, self._service.address), str(error))
            await asyncio.sleep(next(delays))

    def _take(self, reply: weights_pb2.WatchWeightsResponse) -> None:
        self._service.note(reply)
        kind = reply.manifest.WhichOneof("kind")
        published = Published(Version.of(reply.published), reply.manifest.files if kind == "files" else None)
        self.paused = reply.paused
        if published != self.latest:
            _log.info("published", version=published.version.label, with_files=published.files is not None)
            self.latest = published
        self.changes.notify()
