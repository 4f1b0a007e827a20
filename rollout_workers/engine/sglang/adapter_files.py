"""Checks a LoRA adapter's directory before a server is told to load it.

SGLang leaves out what it does not know of an adapter, unless it was started with --lora-strict-loading. An adapter of
another model would then change nothing, and the model without it would go on under the adapter's name. The headers of
the files show it. PEFT's names: `base_model.model.` + the layer's name + `.lora_A.weight` [r, in] or `.lora_B.weight`
[out, r], for a layer whose weight is [out, in].
"""

import re
from collections import defaultdict
from pathlib import Path

from buffer_wire.weights.adapter import ADAPTER_CONFIG, TAKEN, unfit
from rollout_workers.engine import weight_files
from rollout_workers.engine.weight_files import Layout, UnloadableWeights

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.\w+)?\.weight")
_EMBEDDING = re.compile(r".+\.lora_embedding_[AB](?:\.\w+)?")
_OUTPUT_LAYER = "lm_head"
"""Layer that may share the embedding's weight, and then has none of its own in the files of a model."""


def check_adapter(directory: Path, model: Layout | None) -> None:
    """Raise UnloadableWeights unless `directory` holds a whole LoRA adapter, of the model with this layout.

    `model` None: nobody knows the model's layout here, and the shapes are not compared.
    """
    _check_config(directory)
    if pickles := sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth"}):
        raise UnloadableWeights(f"{directory} holds {pickles[0]}, and adapters are safetensors alone")
    halves: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for tensor in weight_files.read_headers(directory):
        named = _TENSOR.fullmatch(tensor.name)
        if named is not None:
            halves[named["layer"]][named["half"]] = tensor.shape
        elif _EMBEDDING.fullmatch(tensor.name) is None:
            hint = ": save it with save_embedding_layers=False" if ".base_layer." in tensor.name else ""
            raise UnloadableWeights(f"{tensor.name} is no tensor of a LoRA adapter{hint}")
    shapes = _shapes_by_place(model or {})
    for layer, found in halves.items():
        if set(found) != {"A", "B"}:
            raise UnloadableWeights(f"{layer} has lora_{min(found)} and not the other half")
        if model is not None and layer.rpartition(".")[2] != _OUTPUT_LAYER:
            _check_layer(layer, found["A"], found["B"], shapes)


def _check_config(directory: Path) -> None:
    path = directory / ADAPTER_CONFIG
    try:
        wrong = unfit(weight_files.read_object(path))
    except OSError as error:
        raise UnloadableWeights(f"{path}: {error.strerror or error}") from error
    if wrong:
        raise UnloadableWeights(f"{path} says {wrong}; engines take {TAKEN}")


def _shapes_by_place(model: Layout) -> dict[str, set[tuple[int, ...]]]:
    """Shapes of the model's tensors by their places, without `.weight`."""
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name, shape in model.items():
        shapes[_place(name.removesuffix(".weight"))].add(shape)
    return shapes


def _place(name: str) -> str:
    """A layer's name from its list of layers on: what stands before it, files and modules may call differently."""
    at = name.find("layers.")
    return name[at:] if at >= 0 else name


def _check_layer(layer: str, a: tuple[int, ...], b: tuple[int, ...], shapes: dict[str, set[tuple[int, ...]]]) -> None:
    place = _place(layer)
    served = shapes.get(place)
    if served is None:
        # A layer of many experts, say, whose weights have names of their own below it.
        if any(name.startswith(f"{place}.") for name in shapes):
            return
        raise UnloadableWeights(f"the engine's model has no {layer}, which the adapter changes")
    if len(a) == len(b) == 2 and (a[0] != b[1] or (b[0], a[1]) not in served):
        raise UnloadableWeights(f"the adapter's {layer} is [{b[0]}, {a[1]}], the engine's {min(served)}")
