"""LoRA adapters for tests, in the files that PEFT writes, with values of a seed."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_adapter(
    directory: Path, *layers: str, out: int = 8, into: int = 4, rank: int = 2, halves: str = "AB", seed: int = 0
) -> Path:
    """Write an adapter of these layers, each [out, into]; returns the directory."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    shapes = {"A": (rank, into), "B": (out, rank)}
    tensors = {
        f"base_model.model.{layer}.lora_{half}.weight": rng.normal(size=shapes[half]).astype(np.float32)
        for layer in layers
        for half in halves
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({layer.rpartition(".")[2] for layer in layers})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
