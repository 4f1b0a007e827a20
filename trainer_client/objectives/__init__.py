"""Objectives of asynchronous policy optimisation as pure torch functions.

Everything here takes tensors and returns tensors or plain numbers: no state, no I/O, no knowledge of
batches, models or the service. Token tensors may be padded [B, T] or packed [ΣT]; a token counts where its
mask says so, and what stands under a masked position (padding, NaN) reaches neither value nor gradient.

Bad shapes and dtypes raise `buffer_wire.errors.InvalidField`, which names the argument.
"""

from trainer_client.objectives.advantages import dr_grpo_advantages, grpo_advantages
from trainer_client.objectives.aipo import AipoReading, aipo_loss
from trainer_client.objectives.diagnostics import (
    RatioDiagnostics,
    ratio_diagnostics,
    ratio_diagnostics_by_staleness,
)
from trainer_client.objectives.tis import tis_policy_gradient_loss, tis_ppo_loss, tis_weights
from trainer_client.objectives.tokens import per_token, selected_logprobs

__all__ = [
    "AipoReading",
    "RatioDiagnostics",
    "aipo_loss",
    "dr_grpo_advantages",
    "grpo_advantages",
    "per_token",
    "ratio_diagnostics",
    "ratio_diagnostics_by_staleness",
    "selected_logprobs",
    "tis_policy_gradient_loss",
    "tis_ppo_loss",
    "tis_weights",
]
