"""LoRA adapters for tests, in the files that PEFT writes, with values of a seed."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Tensors = Mapping[str, npt.NDArray[np.float32]]
SCALE = 2.0
"""lora_alpha over the rank: what the product of the halves is multiplied by."""


def write_adapter(
    directory: Path, *layers: str, out: int = 8, into: int = 4, rank: int = 2, halves: str = "AB", seed: int = 0
) -> Path:
    """Write an adapter of these layers, each [out, into]; returns the directory."""
    tensors = _halves(dict.fromkeys(layers, (out, into)), rank, seed)
    return _write(directory, {name: tensors[name] for name in tensors if name.split(".")[-2][-1] in halves}, rank)


def write_adapter_and_merged(model: Path, at: Path, *, rank: int = 4, seed: int = 0) -> tuple[Path, Path]:
    """Write an adapter of a tiny model's attention, and the model with the adapter merged; returns both directories."""
    base = load_file(model / "model.safetensors")
    layers = {
        name.removesuffix(".weight"): base[name].shape
        for name in base
        if name.endswith(("q_proj.weight", "v_proj.weight"))
    }
    tensors = _halves(layers, rank, seed)
    for layer in layers:
        a, b = (tensors[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
        base[f"{layer}.weight"] = base[f"{layer}.weight"] + np.float32(SCALE) * (b @ a)
    merged = at / "merged"
    shutil.copytree(model, merged)
    save_file(base, merged / "model.safetensors", metadata={"format": "pt"})
    return _write(at / "adapter", tensors, rank), merged


def _halves(layers: Mapping[str, tuple[int, ...]], rank: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {
        f"base_model.model.{layer}.lora_{half}.weight": (0.3 * rng.standard_normal(shape)).astype(np.float32)
        for layer, (out, into) in layers.items()
        for half, shape in (("A", (rank, into)), ("B", (out, rank)))
    }


def _write(directory: Path, tensors: Tensors, rank: int) -> Path:
    directory.mkdir(parents=True)
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
