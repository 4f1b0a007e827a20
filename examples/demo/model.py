"""A tiny Qwen3 made from scratch, its tokenizer, and the directory layout that SGLang and transformers load.

Invariant: a directory appears under its final name complete or not at all, written aside and then renamed. Engines may
open it the moment a version is announced.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.demo import vocabulary


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the demo's model; the defaults make 459,840 parameters."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    """SGLang's CPU attention takes 32 or 64."""
    context_length: int = 4096
    """Tokens, prompt and response together. Rotary positions cost nothing, and engines refuse to be started
    with more than this."""
    initializer_range: float = 0.06
    """Standard deviation of the initial weights: about 1/√hidden_size. The usual 0.02 is made for wide models;
    from it this one needs twice the warm-up and learns half as fast."""


def build_model(seed: int, config: ModelConfig | None = None) -> Qwen3ForCausalLM:
    """A float32 model with random weights that depend on `seed` only; torch's global generator is untouched."""
    config = config or ModelConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocabulary.VOCAB_SIZE,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.context_length,
                initializer_range=config.initializer_range,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=vocabulary.EOS_ID,
                pad_token_id=vocabulary.PAD_ID,
                use_cache=False,
                dtype="float32",
                architectures=["Qwen3ForCausalLM"],
            )
        )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: a BPE without merges over the demo's vocabulary."""
    from tokenizers import Tokenizer, decoders, models

    ids = {token: index for index, token in enumerate(vocabulary.TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=vocabulary.PAD,
        eos_token=vocabulary.EOS,
        clean_up_tokenization_spaces=False,
    )


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write what an engine starts from: weights, configurations and tokenizer.

    Raises FileExistsError where `directory` exists.
    """
    with _appearing_whole(directory) as aside:
        write_weights(model, aside)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(aside)
        build_tokenizer().save_pretrained(aside)


def export_weights(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write what an engine reloads: `model.safetensors` and `config.json`, a few milliseconds.

    Raises FileExistsError where `directory` exists: a published version never changes.
    """
    with _appearing_whole(directory) as aside:
        write_weights(model, aside)


def load_model(directory: Path) -> Qwen3ForCausalLM:
    """The float32 model in `directory`."""
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)


def write_weights(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write `model.safetensors` and `config.json` into an existing directory."""
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    # transformers asks for the format in the metadata.
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.to_json_file(directory / "config.json", use_diff=False)


@contextmanager
def _appearing_whole(directory: Path) -> Iterator[Path]:
    """A directory beside `directory` to write into; renamed to it at the end, removed after an error."""
    if directory.exists():
        raise FileExistsError(f"{directory} exists; weights are written once")
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield aside
        aside.chmod(0o755)
        aside.rename(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
