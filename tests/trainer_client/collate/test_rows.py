"""Rows of trajectories as tensors: refused unless asked for, and counted by trajectory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.support.push import GroupArrays, arrays_for
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch
from trainer_client.collate import collate, micro_batches, pack
from trainer_client.objectives import dr_grpo_advantages, policy_gradient_loss
from trainer_client.session.metrics import of_groups

ROWS = [(1, True, "white"), (1, False, "rival"), (1, True, "white"), (2, True, "white"), (2, True, "black")]
"""Trajectory, trainable, policy."""


def of_rows(task_id: str) -> GroupArrays:
    arrays = arrays_for(task_id, group_size=len(ROWS))
    samples = [
        replace(
            sample,
            trajectory=trajectory,
            trainable=trainable,
            policy=policy,
            reward=float(trajectory),
            loss_mask=sample.loss_mask * np.uint8(trainable),
        )
        for sample, (trajectory, trainable, policy) in zip(arrays.samples, ROWS, strict=True)
    ]
    return replace(arrays, samples=samples)


@pytest.fixture
def batch() -> Batch:
    return assemble(pull_messages([of_rows("t0"), arrays_for("t1", group_size=2), of_rows("t2")]))


def test_metrics_of_a_step_count_each_trajectory_once(batch: Batch) -> None:
    # Of t0: white's trajectory 1 and 2, black's 2. The rival's row is not trainable.
    figures = of_groups([batch.groups[0]])
    assert figures["shard_samples"] == 4
    assert figures["reward_mean"] == pytest.approx((1 + 2 + 2) / 3)
    assert figures["reward_std"] == pytest.approx(np.std([1, 2, 2]))


def test_rows_are_taken_for_samples_by_nobody(batch: Batch) -> None:
    for function in (collate, pack, lambda batch: micro_batches(batch, max_tokens=64)):
        with pytest.raises(InvalidField, match="of task 't0', are rows of trajectories"):
            function(batch)
    assert collate(batch, groups=batch.groups[1:2]).rewards.shape == (2,)


def test_rows_that_are_not_trainable_are_left_out_and_the_others_know_their_trajectory(batch: Batch) -> None:
    assert [(s.trajectory, s.trainable, s.policy) for s in batch.groups[0].samples] == [(t - 1, *x) for t, *x in ROWS]
    assert [sample.trajectory for sample in batch.groups[1].samples] == [0, 1]
    padded = collate(batch, rows=True)
    assert padded.group_index.tolist() == [0] * 4 + [1] * 2 + [2] * 4
    assert padded.trajectory_index.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]
    assert padded.policy_index.tolist() == [2, 2, 2, 1, 0, 0, 2, 2, 2, 1]
    sums = torch.zeros(6, dtype=torch.int64).index_add(0, padded.trajectory_index, padded.loss_mask.sum(1))
    assert padded.trajectory_loss_tokens.tolist() == sums[padded.trajectory_index].tolist()
    assert padded.total_trajectories == 6
    assert int(padded.loss_mask.sum()) == padded.total_loss_tokens


def test_losses_by_trajectory_are_the_same_however_their_rows_are_cut(batch: Batch) -> None:
    def loss(of: object) -> torch.Tensor:
        own = advantages[of.sample_index]  # type: ignore[attr-defined]
        logprobs = of.logprobs.double().requires_grad_()  # type: ignore[attr-defined]
        return policy_gradient_loss(
            logprobs,
            own,
            of.loss_mask,  # type: ignore[attr-defined]
            total_samples=of.total_trajectories,  # type: ignore[attr-defined]
            sample_tokens=of.trajectory_loss_tokens,  # type: ignore[attr-defined]
        )

    whole = collate(batch, rows=True)
    advantages = dr_grpo_advantages(
        whole.rewards.double(), whole.group_index.bincount(), trajectories=whole.trajectory_index
    )
    parts = micro_batches(batch, max_tokens=24, layout="padded", rows=True)
    assert len(parts) > 2
    torch.testing.assert_close(sum(loss(part) for part in parts), loss(whole))
    expected = sum(
        -advantages[i] * whole.logprobs[i].double()[whole.loss_mask[i]].sum() / whole.trajectory_loss_tokens[i]
        for i in range(len(advantages))
    )
    torch.testing.assert_close(loss(whole), expected / 6)


def test_without_a_count_of_trajectories_none_is_made_up(batch: Batch) -> None:
    unknown = replace(batch, info=replace(batch.info, total_trajectories=0))
    assert collate(unknown, rows=True).total_trajectories == 0
    assert collate(unknown, groups=batch.groups[1:2]).total_trajectories == batch.info.total_samples


@pytest.mark.parametrize("given", [{"total_samples": None}, {"sample_tokens": torch.ones(3)}])
def test_tokens_of_samples_are_refused_by_name_where_they_cannot_be(given: dict[str, object]) -> None:
    right = {"total_samples": 2, "sample_tokens": torch.ones(2, dtype=torch.int64)}
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(InvalidField, match="sample_tokens"):
        policy_gradient_loss(logprobs, torch.ones(2), mask, **{**right, **given})  # type: ignore[arg-type]
