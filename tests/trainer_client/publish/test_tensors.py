"""Tensors by value: one safetensors file behind a manifest of its own kind, and a limit that errors name."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import load_file

from buffer_wire.errors import InvalidField
from trainer_client import BufferClient, Publication, TensorsManifest
from trainer_client.publish import FilesPublisher, TensorsPublisher

if TYPE_CHECKING:
    from trainer_client.publish.publication import WeightSource


def publication(version: int) -> Publication:
    return Publication(cast("BufferClient", None), "r", 1, version)


def stored(manifest: TensorsManifest) -> dict[str, torch.Tensor]:
    (file,) = manifest.files.files
    assert file.name == "model.safetensors"
    return load_file(Path(manifest.files.base_url) / file.name)


def test_a_module_is_stored_whole_tied_weights_included(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.second = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
            self.last = torch.nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

    model = Tied()
    with TensorsPublisher(FilesPublisher(tmp_path)) as publisher:
        manifest = publisher.offer(model, publication(1))
    tensors = stored(manifest)
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "first.weight": "torch.float32", "second.weight": "torch.bfloat16", "last.weight": "torch.float32",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor)
    wire = manifest.to_wire()
    assert wire.WhichOneof("kind") == "tensors"
    assert wire.tensors.files.base_url == manifest.files.base_url


def test_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    publisher = TensorsPublisher(FilesPublisher(tmp_path))
    manifest = publisher.offer({"t": base.t(), "row": base[1], "all": base}, publication(1))
    tensors = stored(manifest)
    assert torch.equal(tensors["t"], base.t())
    assert torch.equal(tensors["row"], base[1])


def test_a_model_that_is_too_large_is_refused_with_the_limit(tmp_path: Path) -> None:
    large = {"w": torch.empty(257, 1 << 20, dtype=torch.bfloat16, device="meta")}
    publisher = TensorsPublisher(FilesPublisher(tmp_path))
    with pytest.raises(InvalidField, match="514 MiB of tensors'; it must be at most 512 MiB"):
        publisher.offer(large, publication(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["/some/path", Path("weights"), None, 3])
def test_other_sources_are_refused_by_name(tmp_path: Path, source: object) -> None:
    publisher = TensorsPublisher(FilesPublisher(tmp_path))
    with pytest.raises(InvalidField) as raised:
        publisher.offer(cast("WeightSource", source), publication(1))
    assert raised.value.attributes["field"] == "source"


def test_an_older_version_is_offered_again_as_tensors(tmp_path: Path) -> None:
    publisher = TensorsPublisher(FilesPublisher(tmp_path))
    first = publisher.offer({"w": torch.ones(2)}, publication(1))
    publisher.published(first, committed_steps=1)
    publisher.published(publisher.offer({"w": torch.zeros(2)}, publication(2)), committed_steps=2)
    again = publisher.offer_again(1, publication(3))
    assert publisher.manifest_of(1) == first
    assert publisher.manifest_of(3) == again
    assert (again.files.files, again.files.base_url != first.files.base_url) == (first.files.files, True)
    assert torch.equal(stored(again)["w"], torch.ones(2))
