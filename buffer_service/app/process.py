"""The life of one rpc process: connect, serve, wait for SIGTERM, drain, close."""

import asyncio
import faulthandler
import gc
import signal
import sys

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from buffer_service.app.assignment import READY, Assignment, die_with
from buffer_service.observability import logs
from buffer_service.observability.shared_values import share_values
from buffer_service.observability.store_metrics import StoreMetrics
from buffer_service.rpc.credentials import server_credentials
from buffer_service.rpc.server import build
from buffer_service.security.certificates import TlsRefused
from buffer_service.security.doors import Doors
from buffer_service.security.tokens import TokensRefused
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import RolloutBufferError
from buffer_wire.tracing import process as tracing

log = structlog.get_logger(__name__)

GC_THRESHOLD = 20_000
"""New containers between two looks for cycles; RPCs make hardly any."""


def main() -> None:
    """Serve the assignment on standard input until SIGTERM."""
    # A process that ends by a fault says where.
    faulthandler.enable()
    # Ctrl-C reaches the whole foreground group; the supervisor is the one to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assignment = Assignment.from_json(sys.stdin.buffer.readline())
    die_with(assignment.supervisor_pid)
    logs.configure(assignment.settings.log_level, assignment.settings.log_format)
    if assignment.metrics >= 0:
        share_values(assignment.metrics)
    tracing.start("rollout-buffer")
    try:
        uvloop.run(serve(assignment))
    except RolloutBufferError as error:
        log.critical("rpc process cannot serve", reason=error.reason, why=error.message)
        sys.exit(1)
    except (TokensRefused, TlsRefused) as error:
        log.critical("rpc process cannot serve", why=str(error))
        sys.exit(1)
    finally:
        tracing.stop()


async def serve(assignment: Assignment) -> None:
    """Serve until SIGTERM; RPCs in progress then have `drain_grace_s`."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = assignment.settings
    doors = Doors.of(settings)
    registry = CollectorRegistry()
    calls = StoreMetrics(registry)
    store = await RedisRunStore.connect(
        assignment.store,
        ca=settings.store_ca,
        embedded=assignment.embedded,
        recent_bytes=settings.recent_bytes,
        meter=calls,
        payload_store=settings.payload_store,
    )
    try:
        rpc = build(settings, store, registry, doors.gate)
        if doors.certificates is None:
            rpc.server.add_insecure_port(assignment.address)
        else:
            rpc.server.add_secure_port(assignment.address, server_credentials(doors.certificates))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rpc.janitor.sweep())
            tasks.create_task(rpc.janitor.delete_abandoned())
            tasks.create_task(rpc.janitor.give_memory_back(rpc.rooms))
            await rpc.start()
            # What lives now lives on; looking at it again and again would cost a hundredth of the time.
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            sys.stdout.buffer.write(READY)
            sys.stdout.buffer.flush()
            await stop.wait()
            await rpc.stop(settings.drain_grace_s)
    finally:
        await store.close()
        calls.flush()
