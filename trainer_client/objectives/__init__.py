"""Objectives of asynchronous policy optimisation as pure torch functions.

Every function takes tensors and returns tensors or plain numbers: no state, no I/O, no knowledge of batches, models or
the service. Token tensors may be padded [B, T] or packed [ΣT]; a token counts where its mask says so. A number at a
masked position (padding, NaN) reaches neither value nor gradient.

    advantages   grpo_advantages, dr_grpo_advantages, rloo_advantages: from rewards of groups
    weights      tis_weights, mis_weights, trust_weights: who generated the tokens; passed to a loss as `weights=`
    losses       policy_gradient_loss, ppo_loss, gspo_loss, cispo_loss, aipo_loss, ipo_loss: scalars, all with the
                 denominators of `denominators`, so that parts of a batch add up to the whole
    logs         ratio_sums, ratio_sums_by_staleness, clip_fraction

Bad shapes and dtypes raise `buffer_wire.errors.InvalidField`, which names the argument.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "trainer_client.objectives needs torch, which is not installed: pip install 'rollout-buffer[torch]'"
    ) from error

from trainer_client.objectives.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from trainer_client.objectives.aipo import AipoReading, aipo_loss
from trainer_client.objectives.cispo import cispo_loss
from trainer_client.objectives.denominators import Total
from trainer_client.objectives.diagnostics import (
    RatioDiagnostics,
    RatioSums,
    clip_fraction,
    merged_by_staleness,
    ratio_diagnostics,
    ratio_diagnostics_by_staleness,
    ratio_sums,
    ratio_sums_by_staleness,
)
from trainer_client.objectives.gspo import gspo_loss
from trainer_client.objectives.ipo import ipo_loss
from trainer_client.objectives.policy_gradient import policy_gradient_loss
from trainer_client.objectives.ppo import interpolated_logprobs, ppo_loss
from trainer_client.objectives.samples import RatioLevel
from trainer_client.objectives.tokens import per_token, selected_logprobs
from trainer_client.objectives.weights import mis_weights, tis_weights, trust_weights

__all__ = [
    "AipoReading",
    "RatioDiagnostics",
    "RatioLevel",
    "RatioSums",
    "Total",
    "aipo_loss",
    "cispo_loss",
    "clip_fraction",
    "dr_grpo_advantages",
    "grpo_advantages",
    "gspo_loss",
    "interpolated_logprobs",
    "ipo_loss",
    "merged_by_staleness",
    "mis_weights",
    "per_token",
    "policy_gradient_loss",
    "ppo_loss",
    "ratio_diagnostics",
    "ratio_diagnostics_by_staleness",
    "ratio_sums",
    "ratio_sums_by_staleness",
    "rloo_advantages",
    "selected_logprobs",
    "tis_weights",
    "trust_weights",
]
