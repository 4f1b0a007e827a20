"""Entry point of a relay process: event loop, signals, exit codes.

The first SIGTERM or SIGINT lets transfers end, the second ends at once.
"""

import asyncio
import signal

import structlog
import uvloop

from buffer_wire.errors import InvalidField
from rollout_workers.relay.options import RelayOptions
from rollout_workers.relay.server import Relay

EXIT_OK = 0
"""Exit code: stopped by a signal."""
EXIT_FAULT = 1
"""Exit code: an operating system error: a port that is taken, a directory that cannot be written."""
EXIT_OPTIONS = 2
"""Exit code: options that cannot work, such as a certificate without its key."""
EXIT_KILLED = 130
"""Exit code: a second signal came."""

_log = structlog.get_logger()


def run_relay(options: RelayOptions) -> int:
    """Run a relay to its end; returns the exit code. Call it from the main thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options))


async def _run(options: RelayOptions) -> int:
    try:
        relay = Relay(options)
    except InvalidField as error:
        _log.error("relay cannot start", error=str(error))
        return EXIT_OPTIONS
    stopping = asyncio.Event()
    task = asyncio.current_task()

    def on_signal() -> None:
        if stopping.is_set() and task is not None:
            task.cancel()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await relay.start()
        await stopping.wait()
        _log.info("relay ends", grace_s=options.drain_grace_s)
        await relay.close()
    except OSError as error:
        _log.error("relay ends", error=str(error))
        return EXIT_FAULT
    except asyncio.CancelledError:
        _log.error("ended by a second signal")
        return EXIT_KILLED
    return EXIT_OK
