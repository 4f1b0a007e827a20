"""Names of an adapter's files, as PEFT writes a LoRA adapter; trainer, service and workers share them."""

from collections.abc import Mapping

ADAPTER_CONFIG = "adapter_config.json"
"""File of the adapter's settings: its kind, rank, scale and target modules."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File of the adapter's tensors, as PEFT names it."""
LORA = "LORA"
"""Kind of adapter, `peft_type` in its settings, that engines take."""
TAKEN = f"{LORA!r}, each layer scaled by lora_alpha / r"
"""Adapters that engines take, in words."""
_LEFT_OUT = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens")
"""Settings that change what an adapter does, and that SGLang 0.5.23 does not read, or refuses."""


def unfit(settings: Mapping[str, object]) -> str:
    """Setting of an adapter with which an engine would not generate as the trainer's model does, or nothing."""
    if (kind := settings.get("peft_type")) != LORA:
        return f"peft_type {kind!r}"
    return next((f"{name} {value!r}" for name in _LEFT_OUT if (value := settings.get(name))), "")
