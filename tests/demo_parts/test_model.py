"""The model directory: what transformers reads back, and that it appears whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from examples.demo import model as model_files
from examples.demo import vocabulary
from examples.demo.model import build_model, build_tokenizer, export_weights, load_model, save_model


def logits(model: Qwen3ForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.tensor([vocabulary.encode("12+3=15")])).logits
    return out


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = build_model(1), build_model(1), build_model(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))


def test_it_is_tiny_and_has_the_shapes_that_engines_want() -> None:
    model = build_model(1)
    assert 400_000 < sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.config.head_dim in (32, 64)
    assert model.config.vocab_size % 64 == 0


def test_transformers_loads_the_saved_model_with_the_same_logits(tmp_path: Path) -> None:
    model = build_model(1)
    save_model(model, tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    assert isinstance(again, Qwen3ForCausalLM)
    assert again.dtype == torch.float32
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(load_model(tmp_path / "m")), logits(model))
    assert again.config.eos_token_id == again.generation_config.eos_token_id == vocabulary.EOS_ID


def test_the_saved_tokenizer_and_the_plain_tables_agree(tmp_path: Path) -> None:
    save_model(build_model(1), tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    assert tokenizer.is_fast
    assert len(tokenizer) == vocabulary.VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (vocabulary.PAD_ID, vocabulary.EOS_ID)
    for text in ("7-9=", "-12", "a b  c", vocabulary.ALPHABET):
        assert tokenizer(text)["input_ids"] == vocabulary.encode(text)
        assert tokenizer.decode(vocabulary.encode(text)) == text
    assert tokenizer.decode([2, vocabulary.EOS_ID]) == "0" + vocabulary.EOS


def test_exported_weights_are_a_loadable_model(tmp_path: Path) -> None:
    model = build_model(1)
    export_weights(model, tmp_path / "versions" / "7")
    written = sorted(path.name for path in (tmp_path / "versions" / "7").iterdir())
    assert written == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "versions" / "7" / "model.safetensors").keys() == model.state_dict().keys()
    assert torch.equal(logits(load_model(tmp_path / "versions" / "7")), logits(model))
    config = json.loads((tmp_path / "versions" / "7" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_a_published_version_is_never_written_over(tmp_path: Path) -> None:
    export_weights(build_model(1), tmp_path / "7")
    before = (tmp_path / "7" / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError):
        export_weights(build_model(2), tmp_path / "7")
    assert (tmp_path / "7" / "model.safetensors").read_bytes() == before


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(model_files, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        export_weights(build_model(1), tmp_path / "7")
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_splits_between_all_characters() -> None:
    assert build_tokenizer().tokenize("10+2=12") == list("10+2=12")
