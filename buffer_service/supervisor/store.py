"""The store of a service: an existing one by its URL, or an embedded child that is started again when it dies."""

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import structlog

from buffer_service.observability.addresses import Address
from buffer_service.security.certificates import Certificates, TlsFiles
from buffer_service.settings import Settings
from buffer_service.store.embedded.listener import Listener
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.supervisor import append_only, disk
from buffer_wire.errors import StoreFault

log = structlog.get_logger(__name__)

FOLDER = "store"
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
STABLE_S = 10.0
CERTIFICATE_POLL_S = 1.0


class ServiceStore(AbstractAsyncContextManager["ServiceStore"]):
    """A store that is up inside the context, at an address that does not change."""

    def __init__(self, settings: Settings) -> None:
        self._external = settings.store
        self._embedded = EmbeddedStore(
            settings.data_dir / FOLDER,
            durability=settings.durability,
            binary=settings.store_binary or None,
            listener=_listener(settings),
        )

    @property
    def url(self) -> str:
        """URL of the store, to connect to."""
        return self._external or self._embedded.url

    @property
    def pid(self) -> int | None:
        """Process id of the embedded server, while it runs."""
        return self._embedded.pid

    async def __aenter__(self) -> Self:
        """Raises StoreFault."""
        if not self._external:
            await self._embedded.start()
            log.info("embedded store", pid=self._embedded.pid, durability=self._embedded.durability.value)
            if self._embedded.listener is not None:
                log.info("embedded store listens for payloads", address=str(self._embedded.listener))
            if self._embedded.socket_note:
                log.info("embedded store's socket", note=self._embedded.socket_note)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the embedded server; an existing one is left alone."""
        await self._embedded.stop()

    async def keep_running(self) -> None:
        """Start the embedded server again on the same data whenever it dies; ends when cancelled.

        Also keeps it from writing where its disk is full, or to the wrong place of its file, and its certificate new.
        """
        if self._external:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disk.watch(self._embedded))
            tasks.create_task(append_only.watch(self._embedded))
            tasks.create_task(self._restart_always())
            tasks.create_task(self._renew_certificate())

    async def _renew_certificate(self) -> None:
        listener = self._embedded.listener
        if listener is None or listener.cert is None or listener.key is None:
            return
        certificates = Certificates(TlsFiles(listener.cert, listener.key))
        told = None
        while True:
            if (material := certificates.material()) is not told:
                with contextlib.suppress(StoreFault):
                    await self._embedded.read_certificate()
                    told = material
            await asyncio.sleep(CERTIFICATE_POLL_S)

    async def _restart_always(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            born = loop.time()
            status = await self._embedded.wait()
            log.error("embedded store died", status=status, log=str(self._embedded.log_path))
            if loop.time() - born > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            self._embedded.refuses_writes = not disk.has_room(self._embedded)
            try:
                await self._embedded.restart()
                log.info("embedded store", pid=self._embedded.pid, durability=self._embedded.durability.value)
            except StoreFault as fault:
                log.warning("embedded store does not start", why=fault.message)


def _listener(settings: Settings) -> Listener | None:
    if not settings.payload_listen:
        return None
    at = Address.parse(settings.payload_listen)
    return Listener(at.host, at.port, settings.tls_cert, settings.tls_key)
