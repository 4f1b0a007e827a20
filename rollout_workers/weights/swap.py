"""Exchanges the weights of one engine for those of files: pause → load → verify → go on.

Invariant: the engine is left paused only while its weights cannot be trusted.
"""

import asyncio
import contextlib
from pathlib import Path

from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.errors import EngineError, EngineLoadFailed
from rollout_workers.engine.types import PauseMode
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot

_RESUME_S = 10.0


async def swap(slot: EngineSlot, path: Path, label: str, *, pause_mode: PauseMode, by_value: bool) -> None:
    """Bring the engine to the weights in `path`. Raises EngineError; then `slot.broken` says how it was left."""
    engine = slot.engine
    trusted = not slot.broken
    try:
        with slot.phases.during(weights_pb2.RELOAD_PHASE_PAUSE):
            await engine.pause(pause_mode)
        try:
            with slot.phases.during(weights_pb2.RELOAD_PHASE_LOAD):
                await (engine.load_tensors if by_value else engine.load_files)(path, label)
                reported = await engine.loaded_version()
        except EngineLoadFailed as error:
            trusted = trusted and error.weights == "kept"
            raise
        except asyncio.CancelledError:
            # The engine goes on with a load of files that nobody waits for. Of values some may be there, and some not.
            trusted = trusted and not by_value
            raise
        except Exception:
            trusted = False
            raise
        if reported != label:
            trusted = False
            cause = f"the engine reports {reported!r} after it"
            raise EngineLoadFailed(slot.info.address, str(path), label, cause=cause, weights="unknown")
        trusted = True
    finally:
        # Also when cancelled: an engine that outlives this worker must not stay paused.
        slot.move(Event.WHOLE if trusted else Event.SPOILED)
        if trusted:
            with contextlib.suppress(EngineError, TimeoutError), slot.phases.during(weights_pb2.RELOAD_PHASE_RESUME):
                async with asyncio.timeout(_RESUME_S):
                    await engine.resume()
