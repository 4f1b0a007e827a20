"""Headers of safetensors files: what is complete and of the same model, and what an engine must not be told to load."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from rollout_workers.engine import weight_files
from rollout_workers.engine.weight_files import INDEX_FILE, UnloadableWeights, check_same_model, read_layout
from tests.support.tiny_model import TinyModelShape, write_random_model, write_safetensors


def tensors(**shapes: tuple[int, ...]) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_the_shapes_of_all_tensors_are_read(tmp_path: Path) -> None:
    layout = read_layout(write_random_model(tmp_path, shape=TinyModelShape(layers=1)))
    assert layout["lm_head.weight"] == (512, 64)
    assert len(layout) == 14


def test_several_files_are_one_model(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", tensors(first=(2, 3)))
    write_safetensors(tmp_path / "b.safetensors", tensors(second=(4,)))
    assert read_layout(tmp_path) == {"first": (2, 3), "second": (4,)}


def test_with_an_index_only_its_files_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", tensors(first=(2, 3)))
    write_safetensors(tmp_path / "stray.safetensors", tensors(second=(4,)))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"first": "a.safetensors"}}))
    assert read_layout(tmp_path) == {"first": (2, 3)}


def test_a_file_that_the_index_names_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"first": "a.safetensors"}}))
    with pytest.raises(UnloadableWeights, match="No such file"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"123",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 100) + b"{",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 11) + b'{"a":{"b":1}}'[:11],
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnloadableWeights):
        read_layout(tmp_path)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_than_its_header_promises_is_refused(tmp_path: Path, change: int) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, tensors(first=(5,)))
    data = file.read_bytes()
    file.write_bytes(data[:change] if change < 0 else data + b"x")
    with pytest.raises(UnloadableWeights, match="its header promises"):
        read_layout(tmp_path)


def test_an_absent_or_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnloadableWeights, match=r"no \.safetensors file"):
        read_layout(tmp_path)
    with pytest.raises(UnloadableWeights, match="not a directory"):
        read_layout(tmp_path / "absent")


def test_a_model_with_a_tensor_missing_or_reshaped_is_another_model() -> None:
    served = {"a": (2, 3), "b": (4,)}
    check_same_model({"a": (2, 3), "b": (4,), "tied": (9,)}, served)
    with pytest.raises(UnloadableWeights, match="1 tensors are missing, the first is b"):
        check_same_model({"a": (2, 3)}, served)
    with pytest.raises(UnloadableWeights, match=r"a has shape \[3, 2\], the engine's model has \[2, 3\]"):
        check_same_model({"a": (3, 2), "b": (4,)}, served)


@pytest.mark.parametrize(
    ("further", "place"),
    [
        ("model.layers.2.mlp.w", "model.layers.2"),
        ("model.layers.1.experts.4.w", "model.layers.1.experts.4"),
    ],
)
def test_a_model_with_more_layers_or_experts_is_refused(further: str, place: str) -> None:
    served = {f"model.layers.{layer}.{part}": (1,) for layer in range(2) for part in ("mlp.w", "experts.3.w")}
    with pytest.raises(UnloadableWeights, match=f"no {place}"):
        check_same_model({**served, further: (1,)}, served)


def test_further_tensors_that_are_no_layers_are_allowed() -> None:
    served = {"model.layers.0.w": (1,), "model.norm": (1,)}
    check_same_model({**served, "lm_head.weight": (1,), "model.layers.0.bias": (1,), "vision.blocks.7.w": (1,)}, served)


def test_a_header_that_would_take_too_much_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "MAX_HEADER_BYTES", 100)
    write_safetensors(tmp_path / "model.safetensors", tensors(first=(5,), second=(5,)))
    with pytest.raises(UnloadableWeights, match="at most 100 are read"):
        read_layout(tmp_path)
