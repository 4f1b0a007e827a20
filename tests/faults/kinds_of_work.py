"""Kinds of work that processes are killed in: tasks, what a worker does with them, and what every sample must be.

All values are functions of the tokens, so that those of an interrupted sample are checked as any other's.
"""

import hashlib
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from rollout_workers.agents.episode import AgentEpisode
from rollout_workers.engine.simulated.answers import experts_of
from rollout_workers.episode import Episode
from rollout_workers.errors import InfrastructureError, PolicyError
from rollout_workers.rewards import RewardInput, ragged
from tests.agents.talking import chat, user
from trainer_client import ImageRef, Policy, SamplingParams, Task
from trainer_client.batch import Group, Sample

BATCH_GROUPS = 3
GROUP_SIZE = 2
STEPS = 28
POLICY = Policy(
    batch_groups=BATCH_GROUPS,
    max_queued_groups=4 * BATCH_GROUPS,
    overflow_action="block",
    max_attempts=20,
    retry_backoff_ms=20,
)
"""Nothing is dropped: what a trainer that outruns its engines would lose to a gate is no fault."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of work."""

    task: Callable[[int], Task]
    check: Callable[[Sample], None]
    """Fails for a sample that is not as it was made."""
    flags: tuple[str, ...]
    """Options of the worker."""
    deaths: tuple[str, ...]
    """Places in a step where the trainer dies, in the order of its lives.

    pulled: the batch is in hand; between: one file of an adapter is written, the other one is not; saving: the model is
    written in part; patching: a patch is there, another one is not; renamed: the files are in place, and not noted;
    written: nobody is told of them; published: all is told, and not yet checkpointed.
    """
    check_group: Callable[[Group, Callable[[str], bytes]], None] = lambda _group, _read: None
    """Fails for a group that is not as it was made; it is given the reader of the run's blobs."""
    adapters: bool = False
    """True where the trainer publishes adapters, else whole models with patches."""
    steps: int = STEPS

    def tasks(self) -> list[Task]:
        """All tasks of a run."""
        return [self.task(i) for i in range(self.steps * BATCH_GROUPS)]


def digest(group: Group) -> str:
    """Digest of all that a trainer is given of a group."""
    state = hashlib.sha256(repr(group.images).encode())
    for sample in group.samples:
        state.update(repr((sample.prompt_len, sample.reward, sample.finish_reason, sample.spans)).encode())
        state.update(repr((sample.trajectory, sample.trainable, sample.policy)).encode())
        state.update(repr([(turn.role, turn.start, turn.end) for turn in sample.turns]).encode())
        extras = [sample.extras[name] for name in sorted(sample.extras)]
        for array in (sample.token_ids, sample.logprobs, sample.loss_mask, *extras):
            state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


# ── columns of the engine, and of the reward function ────────────────────────


def routed(i: int) -> Task:
    return Task(
        task_id=f"t{i:04d}",
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=60, top_p=0.9),
        prompt_token_ids=[1 + i % 7, 2, 3 + i % 40],
        columns=["routed_experts", "sampling_mask", "entropy", "top_logprobs_3"],
    )


def reward(sample: RewardInput) -> Mapping[str, object]:
    ids = sample.response_ids
    return {
        "reward": float(len(ids)),
        "odd": int(ids[-1]) % 2,
        "token_rewards": ids.astype(np.float32) / 8,
        "rows": ragged(np.stack([ids[: len(ids) % 5]] * 2, axis=1)),
    }


def check_columns(sample: Sample) -> None:
    ids, start, extras = sample.token_ids, sample.prompt_len, sample.extras
    made = ids[start:]
    assert np.array_equal(extras["routed_experts"][:-1], experts_of(ids[:-1]))
    assert np.array_equal(extras["routed_experts"][-1], extras["routed_experts"][-2])
    counts = extras["sampling_mask_counts"]
    assert not counts[:start].any()
    assert counts[start:].tolist() == (1 + made % 4).tolist()
    assert extras["sampling_mask"][np.cumsum(counts)[start - 1 : -1]].tolist() == made.tolist()
    assert extras["entropy"][start:].tolist() == (made % 7 / np.float32(8)).tolist()
    assert extras["top_ids"][start:, 0].tolist() == made.tolist()
    assert np.array_equal(extras["top_logprobs"][start:, 0], sample.logprobs[start:])
    assert sample.reward == len(made)
    assert extras["odd"].item() == made[-1] % 2
    assert extras["token_rewards"].tolist() == [0.0] * start + (made / 8).tolist()
    assert extras["rows"].tolist() == [[each, each] for each in made[: len(made) % 5].tolist()]


# ── errors of infrastructure and of the policy ───────────────────────────────


def plain(i: int) -> Task:
    return Task(
        task_id=f"t{i:04d}",
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=60),
        prompt_token_ids=[1 + i % 7, 2, 3 + i % 40],
        environment="code",
        reward_timeout_s=30.0,
    )


def flaky(sample: RewardInput) -> float:
    if random.random() < 0.2:
        raise InfrastructureError("no sandbox is free", retry_after_s=0.05)
    if sample.response_ids[-1] % 2:
        raise PolicyError("odd", -1.0)
    return 1.0


def check_failure(sample: Sample) -> None:
    is_odd = bool(sample.token_ids[-1] % 2)
    assert (sample.failure, sample.reward) == (("odd", -1.0) if is_odd else ("", 1.0))


def check_plain(sample: Sample) -> None:
    assert sample.reward == sample.tokens - sample.prompt_len


# ── an agent ─────────────────────────────────────────────────────────────────

SAYINGS = ("guess", "higher", "lower")


def game(i: int) -> Task:
    return Task(
        task_id=f"t{i:04d}",
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=60),
        prompt_token_ids=[0],
        metadata={"i": i},
    )


async def play(episode: AgentEpisode) -> float:
    """Three turns by OpenAI's API, over HTTP."""
    messages: list[dict[str, Any]] = []
    for saying in SAYINGS:
        messages.append(user(f"{saying} {episode.metadata['i']}"))
        messages.append((await chat(episode, messages, max_tokens=16))["message"])
    return float(len(messages))


def check_game(sample: Sample) -> None:
    said = [turn for turn in sample.turns if turn.role == "assistant"]
    assert len(said) == len(SAYINGS)
    assert sample.turns[-1] == said[-1]
    assert sample.reward == 2 * len(SAYINGS)
    mask, at = sample.loss_mask.astype(bool), sample.prompt_len
    for turn in sample.turns:
        assert turn.start == at
        assert mask[turn.start : turn.end].all() == (turn.role == "assistant")
        at = turn.end
    assert at == sample.tokens
    assert (sample.logprobs[mask] < 0).all()
    assert (sample.logprobs[~mask] == 0).all()
    assert sample.spans[-1].end == sample.tokens


# ── images ───────────────────────────────────────────────────────────────────

PLACEHOLDER = 7


def picture(i: int) -> bytes:
    """Choose one of a few images, which many groups share."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (i % 5, 0, 0)).save(out, "PNG")
    return out.getvalue()


def shown(i: int) -> Task:
    places = ((1, 3), (5, 2))
    return Task(
        task_id=f"t{i:04d}",
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=60),
        prompt_token_ids=[1, *[PLACEHOLDER] * 3, 2, *[PLACEHOLDER] * 2, 3],
        images=[ImageRef.of(picture(i + at), start=start, tokens=n) for at, (start, n) in enumerate(places)],
    )


def length(sample: RewardInput) -> float:
    return float(len(sample.response_ids))


def check_answer(sample: Sample) -> None:
    assert PLACEHOLDER not in sample.token_ids[sample.prompt_len :]
    assert sample.token_ids[: sample.prompt_len].tolist() == list(shown(0).prompt_token_ids)


def check_images(group: Group, read: Callable[[str], bytes]) -> None:
    i = int(group.task_id[1:])
    assert group.images == tuple(shown(i).images)
    assert [read(image.sha256) for image in group.images] == [picture(i), picture(i + 1)]


# ── rows of trajectories ─────────────────────────────────────────────────────


async def delegate(episode: Episode) -> float:
    """A turn, a helper that is not trained on, a turn behind its answer, a row that goes on from the last tokens."""
    while sum(turn.role == "assistant" for turn in episode.turns) < 2:
        if episode.turns:
            sub = episode.row(trainable=False, policy="helper")
            if not sub.resumed:
                await sub.set_prompt(ids=[9, *episode.turns[0].ids[-2:]])
            if not sub.turns:
                await sub.generate(16)
            sub.finish()
            if episode.turns[-1].role == "assistant":
                episode.append("tool", ids=sub.turns[0].ids)
        await episode.generate(16)
    episode.finish()
    if len(episode.rows.all) == 1:  # It was interrupted behind the helper's answer.
        episode.row(trainable=False, policy="helper").finish()
    rest = episode.row()
    if not rest.resumed:
        await rest.set_prompt(ids=[8, *episode.turns[-1].ids[-4:]])
    if not rest.turns:
        await rest.generate(16)
    rest.finish()
    return 1.0


delegate.resumable = True  # type: ignore[attr-defined]


def check_row(sample: Sample) -> None:
    mask = sample.loss_mask.astype(bool)
    assert mask.any() == sample.trainable
    assert (sample.logprobs[mask] < 0).all()
    assert (sample.logprobs[~mask] == 0).all()
    assert sample.reward == 1.0
    assert sample.spans[-1].end == sample.tokens


def check_rows(group: Group, _read: Callable[[str], bytes]) -> None:
    rows = [(0, "", True), (0, "helper", False), (0, "", True), (1, "", True), (1, "helper", False), (1, "", True)]
    assert [(s.trajectory, s.policy, s.trainable) for s in group.samples] == rows
    for first, helper, rest in (group.samples[:3], group.samples[3:]):
        turns = [first.token_ids[turn.start : turn.end].tolist() for turn in first.turns]
        assert helper.token_ids.tolist() == [9, *turns[0][-2:], *turns[1]]
        assert rest.token_ids[:5].tolist() == [8, *turns[2][-4:]]


SPEED = ("--simulate", "--tokens-per-s", "150", "--groups-per-engine", "4", "--lease-wait-s", "1")
KINDS = {
    "columns": Kind(
        routed,
        check_columns,
        (*SPEED, "--reward", f"{__name__}:reward"),
        ("pulled", "saving", "patching", "renamed", "written", "published"),
    ),
    "images": Kind(
        shown,
        check_answer,
        (*SPEED, "--reward", f"{__name__}:length"),
        ("pulled", "saving", "published"),
        check_images,
    ),
    "rows": Kind(
        game,
        check_row,
        (*SPEED, "--reward", "", "--rollout", f"{__name__}:delegate"),
        ("pulled", "saving", "published"),
        check_rows,
    ),
    "errors": Kind(
        plain,
        check_failure,
        (*SPEED, "--reward", f"{__name__}:flaky", "--environment-limit", "code.max_sample_attempts=20"),
        ("pulled", "saving", "published"),
    ),
    "agents": Kind(
        game, check_game, (*SPEED, "--reward", "", "--agent", f"{__name__}:play"), ("pulled", "saving", "published")
    ),
}
KINDS_OF_WEIGHTS = {
    "adapters": Kind(
        plain,
        check_plain,
        (*SPEED, "--reward", f"{__name__}:length"),
        ("between", "saving", "renamed", "written"),
        adapters=True,
        steps=18,
    ),
}
"""Kinds of work that differ in what is published."""
