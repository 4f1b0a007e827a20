"""`rollout-buffer serve`, top to bottom: reserve, answer probes, start the store, start the rpc processes, wait, drain.

A stop cuts the start short. The order of the end: readiness off, rpc processes drain, admin page, store closed.
"""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import structlog

from buffer_service.admin.app import AdminPage, Facts
from buffer_service.admin.entrance import Entrance
from buffer_service.admin.front import Front
from buffer_service.admin.metrics.doors import DoorCollector
from buffer_service.admin.server import AdminServer
from buffer_service.app.assignment import Assignment
from buffer_service.observability.addresses import Address
from buffer_service.observability.shared_values import SharedMetrics
from buffer_service.security.doors import Doors
from buffer_service.settings import Settings, redact_url
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.supervisor.address import listening, reserved
from buffer_service.supervisor.data_dir import DataDir, held
from buffer_service.supervisor.open_files import connections
from buffer_service.supervisor.rpc_processes import RpcProcesses
from buffer_service.supervisor.stopping import Stopped, unless
from buffer_service.supervisor.store import ServiceStore
from buffer_wire.errors import LayoutChanged, StoreFault

log = structlog.get_logger(__name__)

PREDECESSOR_S = 5.0
"""Longest time, in seconds, for which the rpc processes of a killed service may still hold the address."""

LAYOUT_S = 2.0
"""Period, in seconds, of asking the store whether its layout is still ours.

Scripts see at once that it is not; this is for the service to end, so that its clients go elsewhere.
"""


async def serve(settings: Settings) -> None:
    """Run the service until SIGTERM or Ctrl-C. Raises AddressRefused, DataDirRefused, StoreFault, StartFailed,
    TokensRefused, TlsRefused, TooFewFiles.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("settings", **settings.redacted())
    allowed = connections(settings)
    settings = settings.model_copy(update={"max_connections": allowed.rpc})
    # The rpc processes read these files themselves; what they would stumble over is refused here.
    doors = Doors.of(settings.for_rpc())
    async with AsyncExitStack() as stack:
        data_dir = stack.enter_context(held(settings.data_dir))
        wait_s = PREDECESSOR_S if data_dir.killed_predecessor else 0.0
        address = stack.enter_context(reserved(Address.parse(settings.listen), wait_s))
        admin_listener = stack.enter_context(listening(Address.parse(settings.admin)))
        front = Front()
        admin = AdminServer(Entrance(front, doors.gate), doors.admin_certificates, front.end, allowed.admin)
        admin_address = Address(Address.parse(settings.admin).host, admin_listener.getsockname()[1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(admin.serve_on(admin_listener))
            try:
                kept_store = await unless(stop, stack.enter_async_context(ServiceStore(settings)))
                connecting = RedisRunStore.connect(
                    kept_store.url,
                    ca=settings.store_ca,
                    embedded=not settings.store,
                    payload_store=settings.payload_store,
                )
                store = await unless(stop, connecting)
                stack.push_async_callback(store.close)
                service = Service(settings, doors, data_dir, address, kept_store, store)
                front.open(service.admin_page())
                store_keeper = tasks.create_task(kept_store.keep_running())
                try:
                    await service.run(tasks, stop, admin_address)
                finally:
                    store_keeper.cancel()
            except Stopped:
                log.info("stopped before it served")
            finally:
                admin.should_exit = True
    log.info("stopped")


class Service:
    """The rpc processes of a service, and whether it is ready."""

    def __init__(
        self,
        settings: Settings,
        doors: Doors,
        data_dir: DataDir,
        address: Address,
        kept_store: ServiceStore,
        store: RedisRunStore,
    ) -> None:
        self._settings = settings
        self._doors = doors
        self._data_dir = data_dir
        self._address = address
        self._store = store
        self._store_name = redact_url(kept_store.url)
        self._metrics = SharedMetrics(settings.rpc_processes)
        assignment = Assignment(os.getpid(), str(address), kept_store.url, settings.for_rpc(), not settings.store)
        self._processes = RpcProcesses(assignment, self._metrics)
        self._not_ready = "the service is starting"
        self._taken_over: LayoutChanged | None = None

    def admin_page(self) -> AdminPage:
        """The admin page of this service."""
        collectors = (DoorCollector(self._doors),)
        facts = Facts(str(self._address), self._store_name, self._metrics, self.not_ready_because, collectors)
        return AdminPage(self._store, facts)

    def not_ready_because(self) -> str:
        """Empty when every rpc process serves."""
        return self._not_ready or ("" if self._processes.all_up else "not every rpc process is up")

    async def run(self, tasks: asyncio.TaskGroup, stop: asyncio.Event, admin_address: Address) -> None:
        """Serve until `stop`, then drain. Raises StartFailed, LayoutChanged, Stopped where it has not served yet."""
        await unless(stop, self._processes.start())
        tasks.create_task(self._processes.keep_running())
        watch = tasks.create_task(self._watch_layout(stop))
        self._not_ready = ""
        with self._data_dir.announced(address=str(self._address), admin=str(admin_address), store=self._store_name):
            log.info(
                "serving",
                address=str(self._address),
                admin=f"{'https' if self._doors.admin_certificates else 'http'}://{admin_address}",
                tls=self._doors.tls,
                tokens="asked for" if self._doors.gate.asks else "none",
                pids=self._processes.pids,
            )
            await stop.wait()
            watch.cancel()
            log.info("draining", grace_s=self._settings.drain_grace_s)
            self._not_ready = "the service is draining"
            await self._processes.drain(self._settings.drain_grace_s)
        if self._taken_over is not None:
            raise self._taken_over

    async def _watch_layout(self, stop: asyncio.Event) -> None:
        """Watch the layout until cancelled; sets `stop` once a service of another version has taken the store over."""
        while True:
            await asyncio.sleep(LAYOUT_S)
            try:
                await self._store.check_layout()
            except LayoutChanged as refusal:
                log.critical("the store was taken over by another version of the service", why=refusal.message)
                self._taken_over = refusal
                stop.set()
                return
            except StoreFault:
                continue  # The next look is soon enough, and rpc processes say what is wrong with the store.
