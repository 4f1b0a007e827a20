import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from rollout_workers.engine.sglang.tensor_pickle import DTYPES, NamedValues, pickled
from rollout_workers.engine.weight_files import read_headers
from tests.support.flattened import tensors_in

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (3, 2, 4), (0, 3)])
def test_torch_reads_what_was_written(dtype: str, shape: tuple[int, ...]) -> None:
    expected = torch.randn(shape).mul(3).to(getattr(torch, DTYPES[dtype]))
    values = expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if expected.numel() else b""
    before = NamedValues("before", "U8", (3,), b"abc")  # What comes next begins where its type allows.
    _, (name, tensor) = tensors_in(pickled([before, NamedValues("layer.0/ü", dtype, shape, values)]))
    assert name == "layer.0/ü"
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (expected.dtype, expected.shape, True)
    assert torch.equal(tensor, expected)
    tensor.zero_()  # it owns its memory


def test_several_tensors_keep_their_order() -> None:
    made = [NamedValues(name, "F32", (2,), np.full(2, i, np.float32).tobytes()) for i, name in enumerate("zax")]
    assert [(name, tensor.tolist()) for name, tensor in tensors_in(pickled(made))] == [
        ("z", [0.0, 0.0]),
        ("a", [1.0, 1.0]),
        ("x", [2.0, 2.0]),
    ]


def test_only_what_a_restricted_unpickler_lets_pass_is_named() -> None:
    # SGLang's allows a list of exact names; these are on it.
    asked: set[str] = set()

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            asked.add(f"{module}.{name}")
            return super().find_class(module, name)

    Restricted(io.BytesIO(pickled([NamedValues("a", "BF16", (1,), b"\0\0")]))).load()
    assert asked == {
        "torch._utils._rebuild_tensor_v2",
        "torch.storage._load_from_bytes",
        "collections.OrderedDict",
        "types.SimpleNamespace",
        "torch.bfloat16",
    }


def test_values_of_a_file_are_those_that_were_saved(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"b": torch.randn(3, 4).to(torch.bfloat16), "a": torch.arange(6).reshape(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)
    read = tensors_in(pickled(NamedValues(t.name, t.dtype, t.shape, t.read()) for t in stored))
    assert {name for name, _ in read} == set(tensors)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in read)
