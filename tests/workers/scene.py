"""A rollout function that makes one group on one simulated engine, and functions of two turns and more."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.episode import Episode
from rollout_workers.functions import Rollout
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.prompts import Prompts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.episodes import Episodes
from rollout_workers.versions import Version
from tests.workers.building import lease, task
from tests.workers.chat import ChatTokenizer

PROMPT = np.array([1, 5, 6], np.int32)
Function = Callable[[Episode], Awaitable[float | None]]


class Scene:
    """One group on one simulated engine."""

    def __init__(self, function: Function, **more: Any) -> None:
        self.most = more.pop("most", 3)
        self.timeout_s = more.pop("timeout_s", 30.0)
        self.partial_rollout: groups_pb2.Group | None = more.pop("partial_rollout", None)
        options = {
            "tokens_per_s": more.pop("tokens_per_s", 1e4),
            "context_length": more.pop("context_length", 1_000),
            "answers": AnswerOptions(length_median=more.pop("length", 10), length_sigma=0),
        }
        self.engine = SimulatedEngine(SimulatedEngineOptions(**options, load_s=0.0, version_label="1.0"))
        self.prompts = Prompts("model", load=lambda _: ChatTokenizer())
        self.rollout = Rollout("m:f", function)
        self.task = task(**{"max_new_tokens": 500, **more})
        self.progress = GroupProgress(lease(self.task), PROMPT)

    async def build(self) -> Episodes:
        if self.partial_rollout is not None:
            self.progress = GroupProgress(lease(self.task, attempt=2, partial_rollout=self.partial_rollout), PROMPT)
            assert self.progress.take_partial_rollout() is None
        if self.task.messages:
            self.progress.prompt_ids = await self.prompts.token_ids(self.task)
        self.slot = EngineSlot("e", self.engine, await self.engine.info(), base_model=None)
        self.slot.adopt(Version(1, 0))
        return Episodes(
            self.progress,
            self.slot,
            Attempts(self.most),
            rollout=self.rollout,
            prompts=self.prompts,
            timeout_s=self.timeout_s,
        )

    async def run(self) -> bool:
        return await asyncio.wait_for((await self.build()).run(), 30)

    def group(self) -> tuple[groups_pb2.GroupHeader, dict[str, Any]]:
        rewards = [sample.reward or 0.0 for sample in self.progress.samples]
        header, payload = self.progress.to_group(rewards, "w")
        return header, dict(read_payload(header, b"".join(payload)))

    def balanced(self) -> bool:
        progress = self.progress
        return progress.received + progress.resumed == progress.generated + sum(progress.discarded.values())


async def two_turns(episode: Episode) -> float | None:
    await episode.generate()
    episode.append("tool", ids=[7, 8, 9])
    await episode.generate()
    episode.finish()
    return 0.5
