"""Parts of a worker that the work on all its leases shares."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_buffer.v1 import tasks_pb2
from rollout_workers.counters import Counters
from rollout_workers.engine.types import PromptImage
from rollout_workers.errors import PromptRefused
from rollout_workers.functions import Rollout
from rollout_workers.generation.images import Images, references_of
from rollout_workers.generation.limits import LimitsOfTasks
from rollout_workers.generation.prompts import Prompts
from rollout_workers.generation.sample import TokenIds
from rollout_workers.generation.spread import Spread
from rollout_workers.rewards import Scorer
from rollout_workers.service.pusher import Pusher
from rollout_workers.tracing.run import WorkerTraces


@dataclass(frozen=True, slots=True)
class Tools:
    """Parts of a worker that all its work shares."""

    worker_id: str
    prompts: Prompts
    scorer: Scorer
    pusher: Pusher
    counters: Counters
    limits: LimitsOfTasks
    rollout: Rollout | None = None
    """Rollout function that makes the samples; None: they are single turns of the model."""
    surplus_samples: int = 0
    """Samples that a group begins beyond its size."""
    spread: Spread | None = None
    """Spread of groups over the worker's engines; None: a group stays where its lease is."""
    images: Images | None = None
    """Images of the run; None: tasks with images are refused."""
    traces: WorkerTraces | None = None
    """Traces of the run; None: tracing is off."""

    async def prompt(self, task: tasks_pb2.Task) -> tuple[TokenIds, Sequence[PromptImage]]:
        """Token ids of a task's prompt, and its images. Raises PromptRefused."""
        references = references_of(task)
        if not references:
            return await self.prompts.token_ids(task), ()
        if self.images is None:
            raise PromptRefused(task.task_id, "this worker reads no images")
        return await self.prompts.with_images(task, await self.images.resolve(task.task_id, references))
