"""Random Qwen3 models with a chat template, of an alphabet of lower-case letters and digits, a token each.

`python model.py DIRECTORY SEEDS`: a model in DIRECTORY/0, 1, …; with no seeds the tokenizer alone. Needs transformers,
and for models torch: SGLang's environment has both.
"""

import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
ALPHABET = "\n 0123456789abcdefghijklmnopqrstuvwxyz.?!"
END_ID = 2
VOCAB_SIZE = len(SPECIAL) + len(ALPHABET)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer."""
    # The stand-ins of byte-level tokenizers for what does not print.
    symbols = [{"\n": "Ċ", " ": "Ġ"}.get(char, char) for char in ALPHABET]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *symbols])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[END_ID]
    )
    fast.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def save_model(directory: Path, seed: int) -> None:
    """Write a model of two layers with random weights, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4_096,
        eos_token_id=END_ID,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def written(folder: Path, sglang_python: Path | None, count: int) -> list[Path]:
    """Directories of `count` models that SGLang's environment has written; without one, of the tokenizer alone."""
    seeds = [str(seed) for seed in range(count)] if sglang_python else []
    subprocess.run([str(sglang_python or sys.executable), __file__, str(folder), *seeds], check=True)
    return sorted(folder.iterdir())


if __name__ == "__main__":
    folder, seeds = Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]]
    for place, seed in enumerate(seeds):
        save_model(folder / str(place), seed)
    if not seeds:
        save_tokenizer(folder / "0")
