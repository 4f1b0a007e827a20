"""Learner of a cell: two optimizer steps a batch, on halves of it, by one of four losses.

All four see the same samples. π_old is the policy before the first of the two steps, by a forward pass of the
trainer's own; μ is the policy that generated. Plain GRPO is PPO's clip against π_old: it takes the samples for π_old's
own. The others correct for μ, each with the bounds that its source uses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from trainer_client.collate.padded import PaddedBatch
from trainer_client.objectives import (
    aipo_loss,
    grpo_advantages,
    mis_weights,
    ppo_loss,
    selected_logprobs,
    tis_weights,
)

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

AIPO_DELTA, DECOUPLED_CAP, TIS_CAP = 4.0, 5.0, 2.0
OPTIMIZER_STEPS = 2
"""A batch."""
LEARNING_RATE = 3e-4
"""The demo's."""
_ADAM_BETAS = (0.9, 0.95)
_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Samples:
    """B samples of T tokens, those of a group one after another."""

    token_ids: Tensor
    """int64 [B, T]."""
    loss_mask: Tensor
    """bool [B, T]: True on tokens that the policy made."""
    behaviour: Tensor
    """float32 [B, T]: log μ."""
    old: Tensor
    """float32 [B, T]: log π_old."""
    advantages: Tensor
    """float32 [B]."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Samples of several micro-batches of as many columns."""
        names = ("token_ids", "loss_mask", "behaviour", "old", "advantages")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def chosen(self, rows: Tensor) -> Self:
        """The samples of these rows."""
        return type(self)(
            self.token_ids[rows], self.loss_mask[rows], self.behaviour[rows], self.old[rows], self.advantages[rows]
        )

    @property
    def log_ratios(self) -> Tensor:
        """|log π_old − log μ| of the tokens that the policy made, float32 [tokens]."""
        return (self.old - self.behaviour)[self.loss_mask].abs()


class Loss(Protocol):
    """Loss of samples, given log π of their tokens under the policy in training, float32 [B, T]."""

    def __call__(self, logprobs: Tensor, samples: Samples) -> Tensor:
        """Return the scalar."""
        ...


def _aipo(logprobs: Tensor, samples: Samples) -> Tensor:
    return aipo_loss(logprobs, samples.behaviour, samples.advantages, samples.loss_mask, delta=AIPO_DELTA)


def _ppo(logprobs: Tensor, samples: Samples, weights: Tensor | None = None) -> Tensor:
    return ppo_loss(logprobs, samples.old, samples.advantages, samples.loss_mask, weights=weights)


def _decoupled(logprobs: Tensor, samples: Samples) -> Tensor:
    weights = mis_weights(samples.old, samples.behaviour, samples.loss_mask, low=0.0, high=DECOUPLED_CAP)
    return _ppo(logprobs, samples, weights)


def _tis(logprobs: Tensor, samples: Samples) -> Tensor:
    return _ppo(logprobs, samples, tis_weights(samples.old, samples.behaviour, samples.loss_mask, cap=TIS_CAP))


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {"AIPO": _aipo, "decoupled PPO": _decoupled, "TIS": _tis, "plain GRPO": _ppo}
)


class Learner:
    """Owner of the model in training and its optimizer. One thread of torch: the engine has the other core."""

    def __init__(self, model: "Qwen3ForCausalLM", loss: str) -> None:
        torch.set_num_threads(1)
        self.model = model
        self._loss = LOSSES[loss]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=_ADAM_BETAS, weight_decay=0.0)

    @torch.no_grad()
    def samples(self, batch: PaddedBatch, group_size: int) -> Samples:
        """Samples of a batch that has come, with π_old: that is the policy now."""
        return Samples(
            token_ids=batch.token_ids,
            loss_mask=batch.loss_mask,
            behaviour=batch.logprobs,
            old=self._logprobs(batch.token_ids),
            advantages=grpo_advantages(batch.rewards.reshape(-1, group_size)).reshape(-1),
        )

    def train(self, samples: Samples) -> None:
        """Make the optimizer steps of a batch, each on as many of its samples."""
        for rows in torch.arange(len(samples.advantages)).chunk(OPTIMIZER_STEPS):
            part = samples.chosen(rows)
            loss = self._loss(self._logprobs(part.token_ids), part)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM)
            self._optimizer.step()

    def _logprobs(self, token_ids: Tensor) -> Tensor:
        return selected_logprobs(self.model(input_ids=token_ids).logits, token_ids)
