"""GRPO, Dr. GRPO and RLOO advantages against numpy, group by group."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from trainer_client.objectives import dr_grpo_advantages, grpo_advantages, rloo_advantages

Advantage = Callable[..., torch.Tensor]
REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, -2.0, 0.25, 3.0], [0.0, 0.0, 0.0, 1.0]])


@pytest.mark.parametrize(("unbiased", "ddof"), [(True, 1), (False, 0)])
def test_grpo_is_the_groups_standard_score(unbiased: bool, ddof: int) -> None:
    advantages = grpo_advantages(torch.tensor(REWARDS), eps=1e-4, unbiased=unbiased)
    expected = [(group - group.mean()) / (group.std(ddof=ddof) + 1e-4) for group in REWARDS]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-12)


def test_grpo_by_hand() -> None:
    # mean 1/4, deviations 3/4 and −1/4, variance (9 + 3·1)/16/3 = 1/4.
    advantages = grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=1e-12)
    np.testing.assert_allclose(advantages.numpy(), [[1.5, -0.5, -0.5, -0.5]], rtol=1e-6)


def test_dr_grpo_is_the_distance_to_the_groups_mean() -> None:
    advantages = dr_grpo_advantages(torch.tensor(REWARDS))
    np.testing.assert_allclose(advantages.numpy(), REWARDS - REWARDS.mean(axis=1, keepdims=True), rtol=1e-12)


def test_rloo_is_the_distance_to_the_mean_of_the_others() -> None:
    advantages = rloo_advantages(torch.tensor(REWARDS))
    expected = [[reward - np.delete(group, i).mean() for i, reward in enumerate(group)] for group in REWARDS]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-12)


def test_rloo_by_hand() -> None:
    # The others' means: 0, 1/2, 1/2; and for a pair the other one's reward.
    advantages = rloo_advantages(torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0]), torch.tensor([3, 2]))
    assert advantages.tolist() == [1.0, -0.5, -0.5, -2.0, 2.0]


def test_rloo_has_no_baseline_for_a_group_of_one() -> None:
    with pytest.raises(InvalidField, match=r"rewards\.shape"):
        rloo_advantages(torch.zeros(3, 1))
    with pytest.raises(InvalidField, match="group_sizes"):
        rloo_advantages(torch.zeros(3), torch.tensor([2, 1]))


@pytest.mark.parametrize("advantage", [grpo_advantages, dr_grpo_advantages, rloo_advantages])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e8 / 3, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(
    advantage: Advantage, value: float, dtype: torch.dtype
) -> None:
    rewards = torch.tensor([[value] * 7, [0.0, 1.0] * 3 + [0.0]], dtype=dtype)
    got = advantage(rewards)
    assert torch.equal(got[0], torch.zeros(7, dtype=dtype))
    assert (got[1] != 0).all()


@pytest.mark.parametrize(
    ("advantage", "second"), [(grpo_advantages, [2.0]), (dr_grpo_advantages, [2.0]), (rloo_advantages, [2.0, 2.0])]
)
def test_ragged_groups_equal_each_group_alone(advantage: Advantage, second: list[float]) -> None:
    groups = [[1.0, 0.0, 0.0], second, [0.0, 4.0, 1.0, 1.0, 0.5], [3.0, 3.0]]
    flat = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    got = advantage(flat, torch.tensor([len(group) for group in groups]))
    expected = torch.cat([advantage(torch.tensor([group], dtype=torch.float64))[0] for group in groups])
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-12, atol=1e-15)
    assert got[3] == 0
    assert torch.equal(got[-2:], torch.zeros(2, dtype=torch.float64))


def test_dtype_and_shape_of_the_rewards_are_kept() -> None:
    assert grpo_advantages(torch.rand(3, 4)).dtype == torch.float32
    assert dr_grpo_advantages(torch.rand(0, 4)).shape == (0, 4)
    assert rloo_advantages(torch.rand(0, 4)).shape == (0, 4)
    assert grpo_advantages(torch.rand(5, dtype=torch.float64), torch.tensor([2, 3])).shape == (5,)


@pytest.mark.parametrize(
    ("rewards", "sizes", "field"),
    [
        (torch.zeros(4), None, "rewards.shape"),
        (torch.zeros(4, 0), None, "rewards.shape"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "rewards.dtype"),
        (torch.zeros(2, 2), torch.tensor([2, 2]), "rewards.shape"),
        (torch.zeros(4), torch.tensor([2.0, 2.0]), "group_sizes"),
        (torch.zeros(4), torch.tensor([[2, 2]]), "group_sizes"),
        (torch.zeros(4), torch.tensor([2, 3]), "group_sizes"),
        (torch.zeros(4), torch.tensor([4, 0]), "group_sizes"),
    ],
)
def test_bad_rewards_are_named(rewards: torch.Tensor, sizes: torch.Tensor | None, field: str) -> None:
    for advantage in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        with pytest.raises(InvalidField) as error:
            advantage(rewards, sizes)
        assert error.value.attributes["field"] == field


def test_eps_must_be_positive() -> None:
    with pytest.raises(InvalidField, match="eps"):
        grpo_advantages(torch.zeros(1, 2), eps=0.0)


# Two groups: trajectories of 2, 1 and 1 rows, and of 1 and 2.
SIZES = torch.tensor([4, 3])
TRAJECTORIES = torch.tensor([0, 0, 1, 2, 0, 1, 1])


def test_rows_have_the_advantage_of_their_trajectory() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.5, 2.0, 4.0, 4.0], dtype=torch.float64)
    for advantage in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        first, second = advantage(torch.tensor([[1.0, 0.0, 0.5]])).tolist()[0], advantage(torch.tensor([[2.0, 4.0]]))
        expected = [first[0], first[0], first[1], first[2], second[0, 0], second[0, 1], second[0, 1]]
        got = advantage(rewards, SIZES, trajectories=TRAJECTORIES)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_rewards_of_rows_are_compared_with_the_means_of_trajectories() -> None:
    # Trajectories have 1/2, 0 and 1, whose mean is 1/2.
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    sizes, trajectories = torch.tensor([4]), torch.tensor([0, 0, 1, 2])
    assert dr_grpo_advantages(rewards, sizes, trajectories=trajectories).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert rloo_advantages(rewards, sizes, trajectories=trajectories).tolist() == [0.5, -0.5, -0.75, 0.75]


def test_rows_are_compared_with_those_of_their_policy() -> None:
    # Two games, white and black; white wins both, the second time by less.
    rewards = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    of: dict[str, Any] = {"trajectories": torch.tensor([0, 0, 1, 1]), "policies": torch.tensor([0, 1, 0, 1])}
    assert dr_grpo_advantages(rewards, torch.tensor([4]), **of).tolist() == [0.25, -0.25, -0.25, 0.25]
    rewards[2:] = rewards[:2]
    assert grpo_advantages(rewards, torch.tensor([4]), **of).tolist() == [0.0] * 4


def test_a_trajectory_that_is_left_alone_has_no_advantage() -> None:
    got = rloo_advantages(torch.tensor([1.0, 1.0]), torch.tensor([2]), trajectories=torch.tensor([0, 0]))
    assert got.tolist() == [0.0, 0.0]
    got = rloo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([2]), trajectories=torch.tensor([5, 5]))
    assert got.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("wrong", [torch.tensor([0, 1]), torch.tensor([0.0, 1.0, 2.0])])
@pytest.mark.parametrize("name", ["trajectories", "policies"])
def test_other_shapes_of_trajectories_are_refused_by_name(wrong: torch.Tensor, name: str) -> None:
    with pytest.raises(InvalidField, match=name):
        grpo_advantages(torch.zeros(3), torch.tensor([3]), **cast("Any", {name: wrong}))


def test_rewards_that_differ_inside_of_trajectories_alone_are_scaled_by_what_they_differ() -> None:
    # Two games of two sides: the mean of each is 0, and so is the spread of the means.
    rewards = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    of: dict[str, Any] = {"trajectories": torch.tensor([0, 0, 1, 1]), "unbiased": False}
    got = grpo_advantages(rewards, torch.tensor([4]), **of)
    np.testing.assert_allclose(got.numpy(), [1, -1, -1, 1], rtol=1e-5)
    # Each trajectory weighs the same, however many rows it has.
    got = grpo_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([5]), trajectories=torch.arange(5) // 3)
    by_hand = torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5]) / 0.5**0.5
    np.testing.assert_allclose(got.numpy(), by_hand.numpy(), rtol=1e-5)
