"""A model's weights as names and tensors, whatever they were given as, and what has to be known of them beforehand.

Invariant: what is sent has exactly the name, dtype and shape that was announced, for an engine that receives another
size than it expects dies of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from buffer_wire.errors import InvalidField
from trainer_client.plan import TensorSpec
from trainer_client.publication import WeightSource

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors: TypeAlias = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""Gives names and tensors anew, in the same order, at each call."""


def named_tensors(source: WeightSource) -> NamedTensors:
    """A state dict, a module (its state dict), or a function that gives names and tensors. Raises InvalidField."""
    if isinstance(source, Mapping):
        return source.items
    if (state_dict := getattr(source, "state_dict", None)) is not None:
        state: Mapping[str, Tensor] = state_dict()
        return state.items
    if callable(source):
        return source  # type: ignore[return-value]  # its results are checked one by one
    raise InvalidField(
        "source", type(source).__name__, "a state dict, a module, or a function that gives named tensors"
    )


def spec_of(name: object, tensor: object) -> TensorSpec:
    """What has to be known before a tensor can be received. Raises InvalidField for what is not a plain tensor."""
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise InvalidField(f"source[{name!r}]", type(tensor).__name__, "a tensor, under a name")
    if hasattr(tensor, "full_tensor"):
        # One rank alone would wait for the others forever.
        raise InvalidField(f"source[{name!r}]", type(tensor).__name__, "gathered on every rank first (full_tensor)")
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def specs_of(tensors: NamedTensors) -> tuple[tuple[TensorSpec, ...], bool]:
    """All of them, in order, and whether the first is on a GPU; goes through the tensors once. Raises InvalidField."""
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


def announced(tensors: NamedTensors, specs: Sequence[TensorSpec]) -> Iterator["Tensor"]:
    """The tensors once more, checked against what was announced. Raises InvalidField."""
    count = 0
    for name, tensor in tensors():
        if count == len(specs) or (found := spec_of(name, tensor)) != specs[count]:
            wanted = "the end" if count == len(specs) else f"as at the first pass: {specs[count]}"
            raise InvalidField(f"source[{name!r}]", spec_of(name, tensor) if count == len(specs) else found, wanted)
        count += 1
        yield tensor
    if count < len(specs):
        raise InvalidField("source", f"{count} tensors", f"as at the first pass: {len(specs)}")
