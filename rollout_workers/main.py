"""Entry point of a worker process: event loop, signals, exit codes.

The first SIGTERM or SIGINT drains, the second ends at once.
"""

import asyncio
import signal

import structlog
import uvloop

from buffer_wire.errors import InvalidRequest, RolloutBufferError
from buffer_wire.tracing import process as tracing
from rollout_workers.counters import describe
from rollout_workers.engine.errors import EngineError
from rollout_workers.errors import EnginesLost
from rollout_workers.options import WorkerOptions
from rollout_workers.worker import Worker

EXIT_OK = 0
"""Exit code: stopped by a signal, and drained."""
EXIT_FAULT = 1
"""Exit code: a bug, or an operating system error."""
EXIT_OPTIONS = 2
"""Exit code: options that cannot work, such as a reward function that is not there."""
EXIT_SERVICE = 3
"""Exit code: the service was not to be reached, or refused this worker."""
EXIT_ENGINES = 4
"""Exit code: an engine did not start, or all were lost."""
EXIT_KILLED = 130
"""Exit code: a second signal came."""

_log = structlog.get_logger()


def run_worker(options: WorkerOptions) -> int:
    """Run one worker to its end; returns the exit code. Call it from the main thread."""
    tracing.start("rollout-worker", {"service.instance.id": options.worker_id})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options))
    finally:
        tracing.stop()


async def _run(options: WorkerOptions) -> int:
    try:
        worker = Worker(options)
    except InvalidRequest as error:
        _log.error("worker cannot start", error=str(error))
        return EXIT_OPTIONS
    again = _stop_at_signals(worker)
    _log.info("worker starts", worker=options.worker_id, run=options.run_id, service=options.address)
    try:
        await worker.run()
    except asyncio.CancelledError:
        if again.is_set():
            _log.error("ended by a second signal")
            return EXIT_KILLED
    except Exception as error:  # noqa: BLE001 - the last stop: every fault becomes an exit code
        return _report(error)
    counters = worker.counters
    _log.info("worker ends", groups_queued=counters.pushed["queued"], **counters.token_account())
    return EXIT_OK


def _stop_at_signals(worker: Worker) -> asyncio.Event:
    """Drain at the first signal, or end at once where nothing was begun; end at the second, which sets the event."""
    loop, task, again = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()

    def on_signal() -> None:
        if worker.stopping:
            again.set()
        if task is not None and (worker.stopping or not worker.slots):
            task.cancel()
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return again


def _report(error: Exception) -> int:
    """Log the faults behind an error; returns the exit code of the first."""
    faults = list(_leaves(error))
    for fault in faults:
        known = isinstance(fault, RolloutBufferError | EngineError | EnginesLost)
        _log.error("worker ends", error=describe(fault), exc_info=None if known else fault)
        for note in getattr(fault, "__notes__", ()):
            _log.error("worker ends", note=note)
    if isinstance(faults[0], RolloutBufferError):
        return EXIT_SERVICE
    return EXIT_ENGINES if isinstance(faults[0], EngineError | EnginesLost) else EXIT_FAULT


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for child in error.exceptions for leaf in _leaves(child)]
    return [error]
