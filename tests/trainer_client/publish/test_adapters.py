"""Adapters on their way from PEFT's files to a manifest."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from buffer_wire.errors import InvalidField
from tests.support.adapters import write_adapter
from tests.trainer_client.publish.test_tensors import publication
from trainer_client import AdapterManifest
from trainer_client.publish import AdapterPublisher, FilesPublisher

if TYPE_CHECKING:
    from trainer_client.publish.publication import WeightSource

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def names(manifest: AdapterManifest) -> list[str]:
    return [file.name for file in manifest.files.files]


def test_settings_and_weights_alone_are_published(tmp_path: Path) -> None:
    def save(directory: Path) -> None:
        directory.rmdir()
        write_adapter(directory, "model.layers.0.self_attn.q_proj")
        (directory / "README.md").write_text("a model card, as PEFT writes one")
        (directory / "reference").mkdir()

    with AdapterPublisher(FilesPublisher(tmp_path / "published")) as publisher:
        written = publisher.offer(save, publication(1))
        copied = publisher.offer(Path(written.files.base_url), publication(2))
        assert names(written) == names(copied) == FILES
        assert written.to_wire().WhichOneof("kind") == "adapter"
        again = publisher.offer_again(1, publication(3))
        assert [file.sha256 for file in again.files.files] == [file.sha256 for file in written.files.files]
        publisher.published(again, committed_steps=3)


@pytest.mark.parametrize("lacking", FILES)
def test_what_is_no_adapter_is_refused_with_the_file_that_it_lacks(tmp_path: Path, lacking: str) -> None:
    source = write_adapter(tmp_path / "source", "a")
    (source / lacking).unlink()
    publisher = AdapterPublisher(FilesPublisher(tmp_path / "published"))
    with pytest.raises(InvalidField, match=f"no {lacking}"):
        publisher.offer(source, publication(1))
    assert list((tmp_path / "published").iterdir()) == []


def test_other_kinds_of_adapters_are_refused(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source", "a")
    publisher = AdapterPublisher(FilesPublisher(tmp_path / "published"))
    for content, why in [
        ('{"peft_type": "IA3"}', "peft_type 'IA3'"),
        ('{"peft_type": "LORA", "use_rslora": true}', "use_rslora True"),
        ("[]", "JSON"),
        ("no JSON", "JSON"),
    ]:
        (source / FILES[0]).write_text(content)
        with pytest.raises(InvalidField, match=why):
            publisher.offer(source, publication(1))


def test_a_model_in_place_of_its_function_is_refused(tmp_path: Path) -> None:
    publisher = AdapterPublisher(FilesPublisher(tmp_path))
    with pytest.raises(InvalidField, match=r"peft_model\.save_pretrained"):
        publisher.offer(cast("WeightSource", {"a": 1}), publication(1))
