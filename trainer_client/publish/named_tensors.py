"""Named tensors: a model's weights as names and tensors, from any kind of source, and their specs.

Invariant: each tensor is sent with exactly the name, dtype and shape that was announced. An engine that receives
another size than it expects dies.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from buffer_wire.errors import InvalidField
from trainer_client.publish.collective.plan import TensorSpec
from trainer_client.publish.publication import WeightSource
from trainer_client.publish.sharded import ShardedWeights

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors: TypeAlias = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""Function that gives names and tensors anew, in the same order, at each call. ShardedWeights know their specs
beforehand."""


def named_tensors(source: WeightSource) -> NamedTensors:
    """Convert a source to NamedTensors: a state dict, a module (its state dict), or a function that gives names and
    tensors.

    A module in DistributedDataParallel gives its own names, as an engine knows them. Raises InvalidField for another
    source.
    """
    if isinstance(source, Mapping):
        return source.items
    if (state_dict := getattr(_unwrapped(source), "state_dict", None)) is not None:
        state: Mapping[str, Tensor] = state_dict()
        return state.items
    if callable(source):
        return source  # type: ignore[return-value]  # its results are checked one by one
    raise InvalidField(
        "source", type(source).__name__, "a state dict, a module, or a function that gives named tensors"
    )


def _unwrapped(source: object) -> object:
    # A module of it can only exist where this is imported already.
    parallel = sys.modules.get("torch.nn.parallel")
    if parallel is not None and isinstance(source, parallel.DistributedDataParallel):
        return source.module
    return source


def spec_of(name: object, tensor: object) -> TensorSpec:
    """Make the spec that a receiver of a tensor needs.

    Raises InvalidField for anything but a plain tensor under a name.
    """
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise InvalidField(f"source[{name!r}]", type(tensor).__name__, "a tensor, under a name")
    if hasattr(tensor, "full_tensor"):
        # One rank alone would wait for the others forever.
        limit = "gathered by all ranks: publish trainer_client.publish.ShardedWeights on every rank"
        raise InvalidField(f"source[{name!r}]", type(tensor).__name__, limit)
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def specs_of(tensors: NamedTensors) -> tuple[tuple[TensorSpec, ...], bool]:
    """Make the specs of all tensors, in order, and tell whether the first is on a GPU. Raises InvalidField.

    Goes through the tensors once, except for sharded ones, which would have to be gathered for it.
    """
    if isinstance(tensors, ShardedWeights):
        return tensors.specs(), tensors.on_gpu
    specs: dict[str, TensorSpec] = {}
    on_gpu = False
    for name, tensor in tensors():
        spec = spec_of(name, tensor)
        if name in specs:
            raise InvalidField(f"source[{name!r}]", "given twice", "given once")
        on_gpu = tensor.is_cuda if not specs else on_gpu
        specs[name] = spec
    if not specs:
        raise InvalidField("source", "empty", "at least one tensor")
    return tuple(specs.values()), on_gpu


def size_of(spec: TensorSpec) -> int:
    """Compute the size of a tensor's values in bytes."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def announced(tensors: NamedTensors, specs: Sequence[TensorSpec]) -> Iterator["Tensor"]:
    """Yield the tensors once more, each checked against the announced spec. Raises InvalidField."""
    count = 0
    for name, tensor in tensors():
        if count == len(specs) or (found := spec_of(name, tensor)) != specs[count]:
            wanted = "the end" if count == len(specs) else f"as at the first pass: {specs[count]}"
            raise InvalidField(f"source[{name!r}]", spec_of(name, tensor) if count == len(specs) else found, wanted)
        count += 1
        yield tensor
        # It goes before the next one is made.
        del tensor
    if count < len(specs):
        raise InvalidField("source", f"{count} tensors", f"as at the first pass: {len(specs)}")
