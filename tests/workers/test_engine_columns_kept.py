"""Columns of the engine over interruptions: calls that add up, turns of an environment, partial rollouts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from buffer_wire.layout import read_payload
from rollout_workers.engine.simulated.answers import experts_of
from rollout_workers.engine.token_rows import PositionRows
from rollout_workers.engine.types import FinishReason, GeneratedSample
from rollout_workers.episode import Episode
from rollout_workers.errors import GenerationFailed
from rollout_workers.generation import samples as of_samples
from rollout_workers.generation.samples import GroupProgress
from tests.workers.building import generated, lease, task
from tests.workers.scene import PROMPT, Scene
from tests.workers.test_samples import version_of

ROUTED = task(group_size=2, columns=["routed_experts"])


def call(progress: GroupProgress, index: int, *tokens: int, rows: bool = True, finish: FinishReason = "abort") -> None:
    """A call of the engine that brings these tokens, and rows of what had none unless it was cut off."""
    sample = progress.samples[index]
    start = sample.positions_known
    inputs = np.concatenate([PROMPT, sample.output_ids, np.array(tokens, np.int32)])[start:-1]
    made = PositionRows(start, experts_of(inputs if rows else inputs[:0]))
    new: GeneratedSample = generated(index, list(tokens), finish=finish)
    sample.append(replace(new, columns={"routed_experts": made}), version_of)


def experts(progress: GroupProgress) -> list[Any]:
    """Column of each sample in the finished group, checked by its tokens."""
    header, payload = progress.to_group([0.0] * len(progress.samples), "w")
    columns = read_payload(header, b"".join(payload))
    ends = np.cumsum([sample.tokens for sample in header.samples])[:-1]
    parts = np.split(columns["routed_experts"], ends)
    for ids, part in zip(np.split(columns["token_ids"], ends), parts, strict=True):
        assert part.dtype == np.uint8
        assert np.array_equal(part[:-1], experts_of(ids[:-1].astype(np.int32)))
    return parts


def continued(progress: GroupProgress) -> GroupProgress:
    """Work that goes on under the next lease."""
    partial_rollout = progress.to_partial_rollout("w")
    after = GroupProgress(lease(progress.task, attempt=2, partial_rollout=partial_rollout), PROMPT)
    assert after.take_partial_rollout() is None
    return after


def test_routed_experts_of_calls_add_up() -> None:
    progress = GroupProgress(lease(ROUTED), PROMPT)
    call(progress, 0, 5, 6)
    assert progress.samples[0].positions_known == 4
    call(progress, 0, 7, rows=False)
    # What an engine that was cut off did not give, the next call is asked for.
    assert progress.samples[0].positions_known == 4
    progress.samples[0].interject(np.array([30, 31], np.int32))
    call(progress, 0, 8, 9, finish="stop")
    call(progress, 1, 4, finish="length")
    first, second = experts(progress)
    assert (len(first), len(second)) == (10, 4)
    assert np.array_equal(first[-1], first[-2])


def test_partial_rollouts_carry_routed_experts() -> None:
    progress = GroupProgress(lease(ROUTED), PROMPT)
    call(progress, 0, 5, 6, 7)
    call(progress, 1, 4, 3, finish="stop")
    after = continued(progress)
    assert [sample.positions_known for sample in after.samples] == [5, 4]
    call(after, 0, 8, finish="stop")
    experts(after)


def test_a_partial_rollout_without_a_row_is_one() -> None:
    progress = GroupProgress(lease(ROUTED), PROMPT)
    call(progress, 0, 5, rows=False)
    after = continued(progress)
    assert after.samples[0].positions_known == 0
    call(after, 0, 8, finish="stop")
    call(after, 1, 4, finish="stop")
    experts(after)


def test_rows_that_do_not_fit_into_a_message_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = GroupProgress(lease(ROUTED), PROMPT)
    call(progress, 0, *range(400))
    call(progress, 1, 4, 3, finish="stop")
    monkeypatch.setattr(of_samples, "MOST_PARTIAL_BYTES", 5_000)
    assert len(progress.to_partial_rollout("w").payload) < 5_000  # type: ignore[union-attr]
    after = continued(progress)
    assert [sample.positions_known for sample in after.samples] == [0, 4]
    call(after, 0, 8, finish="stop")
    experts(after)


def test_finished_samples_that_do_not_fit_into_a_message_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = GroupProgress(lease(task(group_size=3, columns=["routed_experts"])), PROMPT)
    for i in range(2):
        call(progress, i, *range(400), finish="stop")
    call(progress, 2, 5, 6)
    monkeypatch.setattr(of_samples, "MOST_PARTIAL_BYTES", 7_000)
    after = continued(progress)
    assert [len(sample) for sample in after.samples] == [400, 0, 2]
    assert progress.discarded["too_large"] == 400
    call(after, 1, 4, finish="stop")
    call(after, 2, 7, finish="stop")
    experts(after)


def test_a_group_whose_inputs_lack_rows_is_refused_by_name() -> None:
    progress = GroupProgress(lease(ROUTED), PROMPT)
    call(progress, 0, 5, 6, finish="stop")
    call(progress, 1, 5, 6, rows=False, finish="stop")
    with pytest.raises(GenerationFailed, match="sample 1 has routed_experts of 0 positions, and 4 are inputs"):
        progress.to_group([0.0, 0.0], "w")


async def test_turns_of_an_environment_have_routed_experts_and_values_of_nothing() -> None:
    async def rollout(episode: Episode) -> float:
        await episode.generate()
        episode.append("tool", ids=[7, 8, 9])
        await episode.generate()
        # Nobody generates behind these: no engine has seen them.
        episode.append("tool", ids=[1, 2])
        episode.finish()
        return 0.0

    scene = Scene(rollout, group_size=1, columns=["routed_experts", "top_logprobs_2", "entropy"])
    assert await scene.run()
    header, columns = scene.group()
    assert header.samples[0].tokens == 3 + 10 + 3 + 10 + 2
    seen = experts_of(columns["token_ids"][:25])
    assert np.array_equal(columns["routed_experts"], np.concatenate([seen, *[seen[-1:]] * 3]))
    environment = columns["loss_mask"] == 0
    assert not columns["top_logprobs"][environment].any()
    assert not columns["entropy"][environment].any()
    assert np.array_equal(columns["top_ids"][~environment, 0], columns["token_ids"][~environment])


def test_what_is_taken_back_leaves_the_rows_of_what_stays() -> None:
    progress = GroupProgress(lease(task(group_size=1, columns=["routed_experts"])), PROMPT)
    call(progress, 0, 5, 6, finish="stop")
    progress.samples[0].note_turn("assistant", "stop")
    call(progress, 0, 7, 8, finish="stop")
    progress.samples[0].note_turn("assistant", "stop")
    progress.take_back(0, 1, "agent")
    assert progress.samples[0].positions_known == 4
    (kept,) = experts(progress)
    assert len(kept) == 5


def test_rows_that_leave_a_gap_are_refused() -> None:
    with pytest.raises(ValueError, match="from position 5 follow rows up to 3"):
        PositionRows(0, experts_of(PROMPT)) + PositionRows(5, experts_of(PROMPT))
