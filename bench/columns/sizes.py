"""Sizes of the bench: those of a model with 94 layers, 8 of 128 experts for each token."""

from rollout_workers.engine.sglang.launch import free_port

__all__ = ["EXPERTS", "GROUP", "LAYERS", "PROMPT", "TOP_K", "free_port"]

LAYERS, TOP_K, EXPERTS = 94, 8, 128
GROUP = 8
"""Samples of a group."""
PROMPT = 500
"""Tokens of a prompt."""
