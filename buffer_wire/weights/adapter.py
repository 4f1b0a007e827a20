"""Names of an adapter's files, as PEFT writes a LoRA adapter; trainer, service and workers share them."""

ADAPTER_CONFIG = "adapter_config.json"
"""File of the adapter's settings: its kind, rank, scale and target modules."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File of the adapter's tensors, as PEFT names it."""
LORA = "LORA"
"""Kind of adapter, `peft_type` in its settings, that engines take."""
