"""Checks of token tensors that every objective shares: shapes, dtypes, masks, bounds and ratios.

Invariant: a masked position contributes exactly zero to values and gradients, whatever number stands there. It is
replaced before the first exp, never multiplied by zero after it.
"""

import math

import torch
from torch import Tensor

from buffer_wire.errors import InvalidField

_LOGPROB_DTYPES = (torch.float32, torch.float64)
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_logprobs(name: str, logprobs: Tensor) -> None:
    """Refuse anything but a float32 or float64 tensor of shape [B, T] or [ΣT].

    Half precision is refused: at |log π| ≈ 10 bfloat16 is off by up to 0.03, an error of 3 % in every ratio.
    """
    if logprobs.ndim not in (1, 2):
        raise InvalidField(f"{name}.shape", _shape(logprobs), "[B, T] (padded) or [ΣT] (packed)")
    if logprobs.dtype not in _LOGPROB_DTYPES:
        raise InvalidField(f"{name}.dtype", logprobs.dtype, "torch.float32 or torch.float64")


def check_bounds(low: float, high: float) -> None:
    """Refuse bounds of a ratio that are not 0 ≤ low < high; high may be infinite."""
    if not (math.isfinite(low) and low >= 0):
        raise InvalidField("low", low, "a finite number, at least 0")
    if math.isnan(high) or high <= low:
        raise InvalidField("high", high, f"above low = {low}; math.inf for no bound")


def check_clip(clip_low: float | None, clip_high: float) -> None:
    """Refuse a clip [1 − clip_low, 1 + clip_high] that does not hold 1 in its middle; None: no lower bound."""
    if clip_low is not None and not 0 < clip_low < 1:
        raise InvalidField("clip_low", clip_low, "between 0 and 1")
    check_positive("clip_high", clip_high)


def check_same_tokens(name: str, other: Tensor, logprobs: Tensor) -> None:
    """Refuse a floating tensor whose shape is not that of `logprobs`."""
    if other.shape != logprobs.shape:
        raise InvalidField(f"{name}.shape", _shape(other), f"{_shape(logprobs)}, the shape of logprobs")
    if not other.dtype.is_floating_point:
        raise InvalidField(f"{name}.dtype", other.dtype, "a floating dtype")


def check_positive(name: str, value: float) -> None:
    """Refuse a bound that is not a positive finite number."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidField(name, value, "a positive finite number")


def token_mask(loss_mask: Tensor, logprobs: Tensor) -> Tensor:
    """Convert `loss_mask` (bool or integer, shape of `logprobs`; nonzero counts) to bool."""
    if loss_mask.shape != logprobs.shape:
        raise InvalidField("loss_mask.shape", _shape(loss_mask), f"{_shape(logprobs)}, the shape of logprobs")
    if loss_mask.dtype not in _MASK_DTYPES:
        raise InvalidField("loss_mask.dtype", loss_mask.dtype, "bool or an integer dtype")
    return loss_mask != 0


def token_advantages(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Convert `advantages` to a tensor that broadcasts against `logprobs`, in its dtype and cut off from any graph.

    `advantages` is floating, either of the shape of `logprobs` or [B] where `logprobs` is [B, T]. For packed tokens
    spread them first with `per_token`.
    """
    if not advantages.dtype.is_floating_point:
        raise InvalidField("advantages.dtype", advantages.dtype, "a floating dtype")
    advantages = advantages.detach().to(logprobs.dtype)
    if advantages.shape == logprobs.shape:
        return advantages
    if logprobs.ndim == 2 and advantages.shape == logprobs.shape[:1]:
        return advantages.unsqueeze(1)
    raise InvalidField("advantages.shape", _shape(advantages), f"{_shape(logprobs)}, or [B] where logprobs is [B, T]")


def token_staleness(staleness: Tensor, logprobs: Tensor) -> Tensor:
    """Expand `staleness`, integer, to the shape of `logprobs`; it has that shape, or [B] where `logprobs` is [B, T]."""
    if staleness.dtype.is_floating_point or staleness.dtype == torch.bool:
        raise InvalidField("staleness.dtype", staleness.dtype, "an integer dtype")
    if staleness.shape == logprobs.shape:
        return staleness
    if logprobs.ndim == 2 and staleness.shape == logprobs.shape[:1]:
        return staleness.unsqueeze(1).expand(logprobs.shape)
    raise InvalidField("staleness.shape", _shape(staleness), f"{_shape(logprobs)}, or [B] where logprobs is [B, T]")


def log_ratios(
    logprobs: Tensor,
    reference: Tensor,
    loss_mask: Tensor,
    reference_name: str,
    *,
    name: str = "logprobs",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log π − log π_reference of each token, 0 outside the mask, and the mask as bool; checks all three.

    Differentiable in `logprobs` only. `reference_name`, `name`: of the arguments, for errors. `dtype`: of the result;
    None: that of `logprobs`.
    """
    check_logprobs(name, logprobs)
    check_same_tokens(reference_name, reference, logprobs)
    mask = token_mask(loss_mask, logprobs)
    wide = logprobs.to(dtype or logprobs.dtype)
    return torch.where(mask, wide - reference.detach().to(wide.dtype), 0.0), mask


def log_bound(bound: float) -> float:
    """Compute the logarithm of a bound on a ratio, −∞ for 0.

    Clipping logarithms before exp leaves no inf or NaN behind.
    """
    return math.log(bound) if bound > 0 else -math.inf


def token_weights(weights: Tensor | None, logprobs: Tensor, mask: Tensor) -> Tensor | float:
    """Detach `weights` (floating, shape of `logprobs`) and set them to 0 outside `mask`; 1 where None."""
    if weights is None:
        return 1.0
    check_same_tokens("weights", weights, logprobs)
    return torch.where(mask, weights.detach().to(logprobs.dtype), 0.0)


def per_token(values: Tensor, token_counts: Tensor) -> Tensor:
    """Spread one value per sample over the sample's tokens in a packed batch.

    `values`: any dtype [B]. `token_counts`: int64 [B], tokens of each sample. Returns the values' dtype [ΣT].
    """
    if values.ndim != 1:
        raise InvalidField("values.shape", _shape(values), "[B]")
    if token_counts.shape != values.shape or token_counts.dtype != torch.int64:
        raise InvalidField(
            "token_counts", f"{token_counts.dtype} {_shape(token_counts)}", f"torch.int64 {_shape(values)}"
        )
    return torch.repeat_interleave(values, token_counts)


def selected_logprobs(logits: Tensor, token_ids: Tensor, kept: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Compute the log-probability of every token given those before it, aligned with the tokens.

    `logits`: floating [B, T, V], position t predicting token t + 1. `token_ids`: int64 [B, T]. Returns float32 (float64
    for float64 logits) [B, T] where entry t is log π(token t | tokens < t); entry 0, which nothing predicts, is 0.

    `kept` is the sampling mask: ids [R] that could be drawn, token by token, and their number for each token, [B, T].
    Probabilities are then over those alone; over all where the number is 0.
    """
    if logits.ndim != 3 or logits.shape[:2] != token_ids.shape:
        raise InvalidField("logits.shape", _shape(logits), f"[B, T, V] over token_ids {_shape(token_ids)}")
    if token_ids.dtype != torch.int64:
        raise InvalidField("token_ids.dtype", token_ids.dtype, "torch.int64")
    wide = (logits if logits.dtype == torch.float64 else logits.float())[:, :-1]
    if kept is None:
        predicted = torch.log_softmax(wide, dim=-1)
        chosen = predicted.gather(-1, token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    else:
        drawn = wide.gather(-1, token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        chosen = drawn - _log_normaliser(wide, *_checked_kept(*kept, token_ids))
    return torch.nn.functional.pad(chosen, (1, 0))


def _checked_kept(ids: Tensor, counts: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    if counts.shape != token_ids.shape or counts.dtype.is_floating_point:
        limit = f"integers {_shape(token_ids)}, as token_ids"
        raise InvalidField("kept[1]", f"{counts.dtype} {_shape(counts)}", limit)
    number = int(counts[:, 1:].sum())
    if ids.shape != (number,) or ids.dtype.is_floating_point:
        limit = f"integers [{number}], as many as the counts say"
        raise InvalidField("kept[0]", f"{ids.dtype} {_shape(ids)}", limit)
    return ids.long(), counts[:, 1:].long()


def _log_normaliser(logits: Tensor, kept_ids: Tensor, counts: Tensor) -> Tensor:
    """Compute log Σ exp over the kept logits of each position, [B, T]; over all where none is named."""
    flat, number = logits.reshape(-1, logits.shape[-1]), counts.reshape(-1)
    rows = torch.repeat_interleave(torch.arange(len(number), device=number.device), number)
    kept = flat[rows, kept_ids]
    named = number > 0
    most = torch.zeros_like(flat[:, 0]).scatter_reduce(0, rows, kept.detach(), "amax", include_self=False)
    sums = torch.zeros_like(most).index_add(0, rows, (kept - most[rows]).exp())
    # Where nothing is named the logarithm is of 1, so that no infinite gradient comes of what is not chosen.
    over_kept = most + torch.where(named, sums, torch.ones_like(sums)).log()
    return torch.where(named, over_kept, flat.logsumexp(-1)).reshape(counts.shape)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
