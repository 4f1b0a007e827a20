"""Tiny Qwen3 and Qwen3-MoE models made on the spot, without torch: config, safetensors and a byte-level tokenizer.

Two kinds: random ones, and constant ones that always emit the same token. With constant models of different tokens as
successive weight versions, the version that generated each token can be read off the token itself.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

EOS_ID = 2
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")

Tensors = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelShape:
    """Sizes of a tiny Qwen3."""

    vocab_size: int = 512
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context_length: int = 4_096
    experts: int = 0
    """Experts of each layer; 0: the layers are dense."""
    experts_per_token: int = 2


def write_random_model(directory: Path, *, seed: int = 0, shape: TinyModelShape | None = None) -> Path:
    """A model with normally distributed weights; `directory`."""
    shape = shape or TinyModelShape()
    rng = np.random.default_rng(seed)
    return _write(directory, shape, _tensors(shape, rng))


def write_constant_model(directory: Path, token: int, *, shape: TinyModelShape | None = None) -> Path:
    """A model that emits `token` always, also when it is sampled; `directory`."""
    shape = shape or TinyModelShape()
    return _write(directory, shape, constant_tensors(token, shape=shape))


def constant_tensors(token: int, *, shape: TinyModelShape) -> Tensors:
    """The weights of `write_constant_model`, by name."""
    rng = np.random.default_rng(0)
    tensors = _tensors(shape, rng)
    # Every token has the same embedding and the layers add nothing, so the last hidden state is known, and the output
    # layer can single out one token by far.
    direction = rng.standard_normal(shape.hidden).astype(np.float32)
    tensors["model.embed_tokens.weight"][:] = direction
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    tensors["lm_head.weight"][:] = 0
    tensors["lm_head.weight"][token] = direction
    return tensors


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """The safetensors format: length of the header, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in tensors.values():
            stream.write(tensor.tobytes())


def _tensors(shape: TinyModelShape, rng: np.random.Generator) -> Tensors:
    def normal(*size: int) -> npt.NDArray[np.float32]:
        return (0.02 * rng.standard_normal(size)).astype(np.float32)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: Tensors = {"model.embed_tokens.weight": normal(shape.vocab_size, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": ones(shape.hidden),
            at + "self_attn.q_proj.weight": normal(queries, shape.hidden),
            at + "self_attn.k_proj.weight": normal(keys, shape.hidden),
            at + "self_attn.v_proj.weight": normal(keys, shape.hidden),
            at + "self_attn.o_proj.weight": normal(shape.hidden, queries),
            at + "self_attn.q_norm.weight": ones(shape.head_dim),
            at + "self_attn.k_norm.weight": ones(shape.head_dim),
            at + "post_attention_layernorm.weight": ones(shape.hidden),
        }
        feed_forward = [at + "mlp."]
        if shape.experts:
            # Wide apart, so that no rounding changes which experts a token goes to.
            tensors[at + "mlp.gate.weight"] = 20 * normal(shape.experts, shape.hidden)
            feed_forward = [f"{at}mlp.experts.{expert}." for expert in range(shape.experts)]
        for mlp in feed_forward:
            tensors |= {
                mlp + "gate_proj.weight": normal(shape.intermediate, shape.hidden),
                mlp + "up_proj.weight": normal(shape.intermediate, shape.hidden),
                mlp + "down_proj.weight": normal(shape.hidden, shape.intermediate),
            }
    return tensors | {
        "model.norm.weight": ones(shape.hidden),
        "lm_head.weight": normal(shape.vocab_size, shape.hidden),
    }


def _write(directory: Path, shape: TinyModelShape, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    for name, content in {
        "config.json": _config(shape),
        "generation_config.json": {"eos_token_id": EOS_ID, "pad_token_id": 0},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[EOS_ID],
            "model_max_length": shape.context_length,
            "chat_template": _CHAT_TEMPLATE,
        },
    }.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    return directory


def _config(shape: TinyModelShape) -> dict[str, object]:
    of_experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        **(of_experts if shape.experts else {}),
    }


def _tokenizer() -> dict[str, object]:
    """One token per byte, without merges: any text can be encoded, and nothing has to be trained."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *_byte_symbols()))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False},
    }


def _byte_symbols() -> list[str]:
    """The printable stand-ins for the 256 bytes that byte-level tokenizers use (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (0x100 + i for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
