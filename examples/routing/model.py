"""A tiny mixture of experts, as engines load it, and the replay of an engine's routing in it (R3, arXiv 2510.11370)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from examples.demo import vocabulary
from examples.demo.model import build_tokenizer

EXPERTS, EXPERTS_PER_TOKEN, LAYERS = 16, 2, 3


def build_model(seed: int) -> Qwen3MoeForCausalLM:
    """A float32 model with random weights that depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=vocabulary.VOCAB_SIZE,
                hidden_size=128,
                intermediate_size=256,
                moe_intermediate_size=64,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,  # type: ignore[call-arg]
                num_experts=EXPERTS,
                num_experts_per_tok=EXPERTS_PER_TOKEN,
                norm_topk_prob=True,
                max_position_embeddings=4_096,
                initializer_range=0.06,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=vocabulary.EOS_ID,
                pad_token_id=vocabulary.PAD_ID,
                use_cache=False,
                dtype="float32",
            )
        )


def save_model(model: Qwen3MoeForCausalLM, directory: Path) -> None:
    """Write what an engine loads, the weights in bfloat16, with the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=weights)
    build_tokenizer().save_pretrained(directory)
    config = directory / "config.json"
    # transformers' own name of it is another one than SGLang's.
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_experts": EXPERTS, "dtype": "bfloat16"}))


def routers(model: Qwen3MoeForCausalLM) -> list[Qwen3MoeTopKRouter]:
    """Routers of the layers, in order."""
    return [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]


@contextmanager
def replayed(model: Qwen3MoeForCausalLM, experts: Tensor) -> Iterator[None]:
    """Have every position go to the experts that are given, [B, T, layers, k]; how much of each, the router says.

    The weights of the experts stay functions of the router's, so that these have a gradient.
    """

    def route(router: Qwen3MoeTopKRouter, chosen: Tensor) -> None:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            scores = logits.softmax(-1).gather(-1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True), chosen

        router.forward = forward  # type: ignore[method-assign]

    try:
        for layer, router in enumerate(routers(model)):
            route(router, experts[:, :, layer].reshape(-1, experts.shape[-1]).long())
        yield
    finally:
        for router in routers(model):
            vars(router).pop("forward", None)
