"""Adapters publisher: hands LoRA adapters to the engines, which serve them on the weights that they started with.

An adapter is what PEFT writes: its settings and one safetensors file. It travels as a files publisher's files.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import cast

from buffer_wire.errors import InvalidField
from buffer_wire.weights.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TAKEN, unfit
from trainer_client.manifest import AdapterManifest
from trainer_client.publish.publication import Publication, Save, WeightSource
from trainer_client.publish.tensors import OverFiles


class AdapterPublisher(OverFiles[AdapterManifest]):
    """Publisher of LoRA adapters through `files`, which it closes with itself. Pass it to `BufferClient.session`."""

    _kind = AdapterManifest

    def offer(self, source: WeightSource, publication: Publication) -> AdapterManifest:
        """Write an adapter: from a directory, or by a function such as `peft_model.save_pretrained`.

        Of what the source holds, the settings and the weights alone are published. Raises InvalidField for other
        sources, for what is no LoRA adapter in safetensors, and for settings that engines leave out: use_rslora, say.
        """
        if isinstance(source, Path | str):
            save: Save = partial(_copy, Path(source))
        elif callable(source) and not hasattr(source, "state_dict"):
            save = cast("Save", source)
        else:
            limit = "a directory, or a function that writes an adapter into one, such as peft_model.save_pretrained"
            raise InvalidField("source", type(source).__name__, limit)

        def write(directory: Path) -> None:
            save(directory)
            _keep_adapter(directory)

        return AdapterManifest(self._files.write(write, term=publication.term, version=publication.version))


def _copy(source: Path, directory: Path) -> None:
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _keep_adapter(directory: Path) -> None:
    """Remove what lies beside the adapter. Raises InvalidField where there is none."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            path.unlink()
    lacking = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (directory / name).is_file()]
    if lacking:
        raise InvalidField("source", f"no {' and no '.join(lacking)}", "a LoRA adapter as PEFT writes it")
    try:
        wrong = unfit(json.loads((directory / ADAPTER_CONFIG).read_bytes()))
    except (ValueError, AttributeError) as error:
        raise InvalidField("source", f"{ADAPTER_CONFIG}: {error}", "JSON, as PEFT writes it") from error
    if wrong:
        raise InvalidField("source", wrong, f"{TAKEN}, which engines take")
