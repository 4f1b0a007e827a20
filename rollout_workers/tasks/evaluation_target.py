"""Target of an engine that works for evaluations only: the weights that it is to load, in place of the published ones.

Such an engine follows no publishes, and is not reported either. No trainer waits for it or makes it a member of a
process group. It does not count among the engines that may be out of service.
"""

import structlog

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.versions import Version
from rollout_workers.weights.watcher import Published, WeightWatcher

_POLL_S = 5.0
_log = structlog.get_logger()


class EvaluationTarget(WeightWatcher):
    """Watcher of the weights that evaluations want, for the loader of one engine; it is not `run`."""

    async def aim(self, slot: EngineSlot, wanted: tasks_pb2.WantedWeights) -> None:
        """Have the engine loaded with these weights; returns when it has them, or soon, to ask again what is wanted."""
        target = Published.of(Version.of(wanted.version), wanted.manifest)
        if target != self.latest:
            self.latest = target
            _log.info("evaluation wants", engine=slot.engine_id, version=target.version.label)
            if target.only_broadcast:
                why = f"weights {target.version} were broadcast and come without files: no evaluation of them here"
                slot.failed(RuntimeError(why))
            self.messages += 1
            self.changes.notify()
        await slot.changes.until(lambda: slot.leasable and slot.loaded == target.version, _POLL_S)
