"""A LoRA adapter in plain torch: layers of a model wrapped, and written in the files that PEFT writes.

With PEFT both are its own: `get_peft_model(model, LoraConfig(…))`, and `session.publish(model.save_pretrained)`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from buffer_wire.weights.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(nn.Module):
    """A linear layer whose weight stays, plus alpha/rank · B·A; B begins at 0."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer under the adapter, [..., out]."""
        out: torch.Tensor = self.base(x) + self.scale * (x @ self.a.T @ self.b.T)
        return out


class Adapter:
    """Adapter of a model, which it changes: all of the model but the adapter is frozen."""

    def __init__(self, model: nn.Module, *, rank: int, alpha: float) -> None:
        model.requires_grad_(requires_grad=False)
        self._rank, self._alpha = rank, alpha
        self._layers: dict[str, Lora] = {}
        for name, layer in list(model.named_modules()):
            parent, _, own = name.rpartition(".")
            if own in TARGETS and isinstance(layer, nn.Linear):
                self._layers[name] = Lora(layer, rank, alpha)
                setattr(model.get_submodule(parent), own, self._layers[name])

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return [half for layer in self._layers.values() for half in (layer.a, layer.b)]

    def save(self, directory: Path) -> None:
        """Write it into a directory, as PEFT does."""
        tensors = {
            f"base_model.model.{name}.lora_{half}.weight": value.detach().clone()
            for name, layer in self._layers.items()
            for half, value in (("A", layer.a), ("B", layer.b))
        }
        save_file(tensors, directory / ADAPTER_WEIGHTS)
        config = {
            "peft_type": "LORA", "r": self._rank, "lora_alpha": self._alpha, "target_modules": TARGETS, "bias": "none",
        }  # fmt: skip
        (directory / ADAPTER_CONFIG).write_text(json.dumps(config))
