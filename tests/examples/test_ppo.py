"""Advantages of the PPO example, beside their definition."""

import pytest

torch = pytest.importorskip("torch")

from examples.ppo.critic import gae  # noqa: E402


def test_advantages_are_discounted_sums_of_temporal_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 6, generator=generator), torch.rand(2, 6, generator=generator)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    gamma, lam = 0.9, 0.8
    expected = torch.zeros_like(rewards)
    for row in range(2):
        places = mask[row].nonzero().flatten().tolist()
        following = [*values[row, places[1:]].tolist(), 0.0]
        deltas = [
            rewards[row, place].item() + gamma * after - values[row, place].item()
            for place, after in zip(places, following, strict=True)
        ]
        for index, place in enumerate(places):
            expected[row, place] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[index:]))
    torch.testing.assert_close(gae(rewards, values, mask, gamma=gamma, lam=lam), expected)
