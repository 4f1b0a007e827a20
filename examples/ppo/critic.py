"""The critic: the value of what a response has so far, and what PPO makes of its values.

A column per token: the value at token t is that before it was drawn, so the critic's output at the token before.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM


class Critic(nn.Module):
    """The policy's trunk with one number a token in place of logits."""

    def __init__(self, policy: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.trunk = policy.model
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Compute the values float32 [B, T] of token ids int64 [B, T], padded on the right."""
        hidden = self.trunk(input_ids=token_ids).last_hidden_state
        after: Tensor = self.head(hidden).squeeze(-1)
        return torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], dim=1)

    def save(self, path: Path) -> None:
        """Write the weights to a file that appears at once."""
        aside = path.with_name(f".{path.name}")
        save_file({name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}, aside)
        os.replace(aside, path)  # noqa: PTH105 - what readers see is one of the two

    def load(self, path: Path) -> None:
        """Take the weights of a file."""
        self.load_state_dict(load_file(path))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Compute generalized advantages (Schulman et al., arXiv:1506.02438, equation 16), float32 [B, T].

    `rewards` and `values`: float32 [B, T], of each token and before it. `mask`: bool [B, T], one stretch in each row.
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    value_after = torch.zeros_like(following)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        following = torch.where(mask[:, t], delta + gamma * lam * following, 0.0)
        value_after = torch.where(mask[:, t], values[:, t], 0.0)
        advantages[:, t] = following
    return advantages
