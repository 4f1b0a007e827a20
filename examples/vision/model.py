"""A small GLM-4V with random weights, its tokenizer and its processor, as a directory that engines load."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import Glm4vConfig, Glm4vForConditionalGeneration, PreTrainedTokenizerFast

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
"""Answers, and the colours that they name."""

SPECIAL = (
    *("<|pad|>", "<|user|>", "<|end|>"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
TOKENS = (*SPECIAL, *COLOURS, *"abcdefghijklmnopqrstuvwxyz ?:")
IDS = {token: i for i, token in enumerate(TOKENS)}
IMAGE, END = IDS["<|image|>"], IDS["<|end|>"]

_TEMPLATE = (
    "{% for m in messages %}<|user|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
)


def build_model(seed: int) -> Glm4vForConditionalGeneration:
    """A float32 model of two layers for the eyes and two for the words; its weights depend on `seed` alone."""
    text = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of 32, as SGLang's attention on a CPU takes them
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 2, 2],
            "partial_rotary_factor": 0.5,
            "rope_theta": 10_000.0,
        },
        "initializer_range": 0.1,
        "eos_token_id": END,
        "pad_token_id": IDS["<|pad|>"],
    }
    eyes = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "image_size": 112,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "initializer_range": 0.1,
    }
    config = Glm4vConfig(
        text_config=text,
        vision_config=eyes,
        image_token_id=IMAGE,
        video_token_id=IDS["<|video|>"],
        image_start_token_id=IDS["<|begin_of_image|>"],
        image_end_token_id=IDS["<|end_of_image|>"],
        video_start_token_id=IDS["<|begin_of_video|>"],
        video_end_token_id=IDS["<|end_of_video|>"],
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["Glm4vForConditionalGeneration"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Glm4vForConditionalGeneration(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each special one, each answer, and each letter."""
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "clean_up_tokenization_spaces": False}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    made.add_tokens(list(COLOURS))
    made.chat_template = _TEMPLATE
    return made


def save(model: Glm4vForConditionalGeneration, directory: Path) -> None:
    """Write the model with everything that an engine and a processor need."""
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    preprocessor = {
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 112 * 112},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=1))
