"""A small decoder-only transformer with random weights, whole or spread over the ranks by FSDP2."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape; the defaults make 65,664 parameters."""

    vocab_size: int = 64
    hidden: int = 48
    layers: int = 2
    heads: int = 2
    context_length: int = 288
    """Tokens, prompt and response together."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it; [B, T, hidden] to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.queries_keys_values = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.attention_out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp_in = nn.Linear(config.hidden, 2 * config.hidden)
        self.mlp_out = nn.Linear(2 * config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """One layer."""
        samples, tokens, width = hidden.shape
        projected = self.queries_keys_values(self.attention_norm(hidden))
        heads = projected.view(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        out: Tensor = hidden + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return out


class Transformer(nn.Module):
    """Token ids int64 [B, T] to logits float32 [B, T, vocab_size]. Padding is on the right, where no token sees it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.context_length, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Position t predicts token t + 1."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden = self.embed(token_ids) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build_model(seed: int, config: ModelConfig | None = None) -> Transformer:
    """Make the same weights on every rank that gives the same seed."""
    torch.manual_seed(seed)
    return Transformer(config or ModelConfig())


def shard(model: Transformer, world_size: int) -> Transformer:
    """Spread it over the ranks: every block by itself, then what is left."""
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
