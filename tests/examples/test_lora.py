"""The adapter of the LoRA example: its files are those of the model under it, and of no other model."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.lora.adapter import TARGETS, Adapter
from rollout_workers.engine.sglang.adapter_files import check_adapter
from rollout_workers.engine.weight_files import read_layout
from tests.support.tiny_model import write_random_model
from trainer_client import Publication
from trainer_client.publish import AdapterPublisher, FilesPublisher

IDS = torch.tensor([[40, 41, 42, 43]])


def read(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


@torch.no_grad()
def test_files_of_the_adapter_merged_are_the_model_that_is_trained(tmp_path: Path) -> None:
    base = write_random_model(tmp_path / "base")
    model = read(base)
    adapter = Adapter(model, rank=2, alpha=4.0)
    untrained = model(IDS).logits
    assert torch.equal(untrained, read(base)(IDS).logits)
    for parameter in adapter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    with AdapterPublisher(FilesPublisher(tmp_path / "published")) as publisher:
        manifest = publisher.offer(adapter.save, Publication(None, "r", 1, 1))  # type: ignore[arg-type]
    written = Path(manifest.files.base_url)
    check_adapter(written, read_layout(base))
    halves, merged = load_file(written / "adapter_model.safetensors"), read(base)
    assert len(halves) == 2 * len(TARGETS) * merged.config.num_hidden_layers
    for name in [name for name in halves if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = halves[name.replace("lora_A", "lora_B")] @ halves[name]
        merged.get_parameter(f"{layer}.weight").add_(4.0 / 2 * product)
    torch.testing.assert_close(model(IDS).logits, merged(IDS).logits, rtol=0, atol=1e-5)
    assert not torch.allclose(model(IDS).logits, untrained, atol=1e-3)
