"""Tensors streamed into safetensors files: what every reader of the format expects, from one pass over the tensors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from buffer_wire.errors import InvalidField
from rollout_workers.engine.weight_files import read_headers
from trainer_client.publish.named_tensors import named_tensors, specs_of
from trainer_client.publish.saving import save_tensors

MIXED = {
    "a byte": torch.tensor([1], dtype=torch.int8),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "eighth": torch.arange(5).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False, True]),
    "matrix": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "index": torch.arange(4),
}


def check_same(stored: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (stored[name].dtype, stored[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            stored[name].contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )


def test_every_type_and_shape_is_read_back_as_it_was(tmp_path: Path) -> None:
    save_tensors(MIXED.items, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    check_same(load_file(tmp_path / "model.safetensors"), MIXED)


def test_every_tensor_is_aligned_to_its_type_and_the_worker_reads_it(tmp_path: Path) -> None:
    save_tensors(MIXED.items, tmp_path)
    headers = {stored.name: stored for stored in read_headers(tmp_path)}
    assert headers.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        stored = headers[name]
        assert stored.start % tensor.element_size() == 0
        assert stored.read() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_several_files_hold_no_more_than_asked_but_for_a_larger_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((n,), float(i)) for i, n in enumerate([10, 10, 10, 50, 5, 5])}
    save_tensors(tensors.items, tmp_path, max_file_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 90}
    # 40 + 40 bytes, 40, 200, 20 + 20.
    assert list(index["weight_map"].values()) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 1, 2, 3, 4, 4)]
    together: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        together |= load_file(tmp_path / name)
    check_same(together, tensors)
    assert {stored.name for stored in read_headers(tmp_path)} == tensors.keys()


def test_tensors_are_asked_for_one_after_another(tmp_path: Path) -> None:
    sizes = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            # What came before lies in the file when the next one is asked for, but for the buffer of the file.
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            yield f"t{i}", torch.full((100_000,), float(i))

    specs, _ = specs_of(tensors)
    sizes.clear()
    save_tensors(tensors, tmp_path, specs=specs)
    assert len(sizes) == 4
    assert [size // 400_000 for size in sizes] == [0, 1, 2, 3]


def test_other_tensors_than_announced_are_refused(tmp_path: Path) -> None:
    announced = specs_of({"a": torch.zeros(2), "b": torch.zeros(2)}.items)[0]
    for given in (
        {"a": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(3)},
        {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)},
    ):
        with pytest.raises(InvalidField, match=r"as at the first pass|the end"):
            save_tensors(given.items, tmp_path, specs=announced)


def test_types_that_the_format_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidField) as raised:
        save_tensors({"w": torch.zeros(2, dtype=torch.complex128)}.items, tmp_path)
    assert raised.value.attributes["field"] == "source['w'].dtype"


def test_a_module_in_ddp_gives_its_own_names(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        inner = torch.nn.Linear(2, 1)
        wrapped = torch.nn.parallel.DistributedDataParallel(inner)
        assert [name for name, _ in named_tensors(wrapped)()] == ["weight", "bias"]
    finally:
        dist.destroy_process_group()
