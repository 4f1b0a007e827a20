"""The learner: one optimizer step per batch, on one core, from arrays as the buffer service delivers them.

Invariants: prompts start in column 0 and padding is on the right. So causal attention alone keeps padding away from
every token that counts, without an attention mask. A checkpoint appears under its name complete or not at all.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from buffer_wire.errors import InvalidField
from examples.demo import model as model_files
from trainer_client.objectives import (
    AipoReading,
    RatioDiagnostics,
    aipo_loss,
    policy_gradient_loss,
    ratio_diagnostics,
    ratio_diagnostics_by_staleness,
    selected_logprobs,
    tis_weights,
)

Array: TypeAlias = Tensor | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Objective and optimizer. The defaults hold with a behaviour policy 1 to 4 versions old."""

    objective: Literal["aipo", "tis"] = "aipo"
    aipo_delta: float = 4.0
    aipo_reading: AipoReading = "ratio_detached"
    tis_cap: float = 2.0
    learning_rate: float = 3e-4
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    threads: int = 1
    """Threads of torch in this process: the engine has the other core."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One batch, padded on the right; numpy arrays or tensors, B samples of up to T tokens."""

    token_ids: Array
    """int64 [B, T]: prompt and response from column 0."""
    prompt_len: Array
    """int64 [B], in tokens, at least 1."""
    loss_mask: Array
    """bool or uint8 [B, T]: 1 on tokens that the policy made."""
    behaviour_logprobs: Array
    """float32 [B, T]: of the policy that made the token; ignored where the mask is 0."""
    advantages: Array
    """float32 [B]."""
    staleness: Array | None = None
    """int64 [B], in versions: only for the diagnostics."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Figures of one optimizer step, before it changed the weights."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    grad_norm: float
    """Before clipping."""
    loss_tokens: int
    entropy: float
    """Mean entropy of the policy at the masked tokens, in nats."""
    ratio: RatioDiagnostics
    ratio_by_staleness: Mapping[str, RatioDiagnostics] = field(default_factory=dict)
    """Empty where the batch states no staleness."""
    step_s: float = 0.0


class Learner:
    """Owns the model in training and its optimizer. Not for use from several threads at once."""

    def __init__(self, model: Qwen3ForCausalLM, config: LearnerConfig | None = None) -> None:
        self.model = model
        self.config = config or LearnerConfig()
        self.steps = 0
        torch.set_num_threads(self.config.threads)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self.config.learning_rate,
            betas=self.config.adam_betas,
            weight_decay=self.config.weight_decay,
        )

    def step(self, batch: TrainBatch) -> StepMetrics:
        """One optimizer step on the whole batch.

        Raises `InvalidField` for arrays of another shape or dtype, and for a mask that touches a prompt; the
        weights are then unchanged.
        """
        started_s = time.perf_counter()
        tensors = _checked(batch)
        logits = self.model(input_ids=tensors.token_ids).logits
        logprobs = selected_logprobs(logits, tensors.token_ids)
        loss = self._loss(logprobs, tensors)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self._optimizer.step()
        self.steps += 1
        inputs = (logprobs, tensors.behaviour_logprobs, tensors.loss_mask)
        return StepMetrics(
            step=self.steps,
            loss=loss.item(),
            grad_norm=norm.item(),
            loss_tokens=int(tensors.loss_mask.sum()),
            entropy=_mean_entropy(logits.detach(), tensors.loss_mask),
            ratio=ratio_diagnostics(*inputs),
            ratio_by_staleness=(
                {} if tensors.staleness is None else ratio_diagnostics_by_staleness(*inputs, tensors.staleness)
            ),
            step_s=time.perf_counter() - started_s,
        )

    def export_weights(self, directory: Path) -> None:
        """Write the present weights for the engines; see `model.export_weights`."""
        model_files.export_weights(self.model, directory)

    def save_checkpoint(self, path: Path) -> None:
        """Write weights, optimizer state and step count to one file, replacing an older one at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "config": asdict(self.config),
        }
        try:
            with aside.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def load_checkpoint(self, path: Path) -> None:
        """Continue from a checkpoint: the next step is the one that would have followed it.

        Raises FileNotFoundError where there is none, and `InvalidField` where it was made with other settings.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["config"] != asdict(self.config):
            raise InvalidField("checkpoint.config", state["config"], f"{asdict(self.config)}, as this learner's")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]

    def _loss(self, logprobs: Tensor, tensors: "_Tensors") -> Tensor:
        behaviour, advantages, mask = tensors.behaviour_logprobs, tensors.advantages, tensors.loss_mask
        if self.config.objective == "aipo":
            delta, reading = self.config.aipo_delta, self.config.aipo_reading
            return aipo_loss(logprobs, behaviour, advantages, mask, delta=delta, reading=reading)
        weights = tis_weights(logprobs, behaviour, mask, cap=self.config.tis_cap)
        return policy_gradient_loss(logprobs, advantages, mask, weights=weights)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A checked batch, cut to its last token that counts."""

    token_ids: Tensor
    loss_mask: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    staleness: Tensor | None


def _checked(batch: TrainBatch) -> _Tensors:
    token_ids = _tensor("token_ids", batch.token_ids, (torch.int64,), None)
    if token_ids.ndim != 2:
        raise InvalidField("token_ids.shape", list(token_ids.shape), "[B, T]")
    rows, columns = token_ids.shape
    prompt_len = _tensor("prompt_len", batch.prompt_len, (torch.int64,), (rows,))
    mask = _tensor("loss_mask", batch.loss_mask, (torch.bool, torch.uint8), (rows, columns)).bool()
    behaviour = _tensor("behaviour_logprobs", batch.behaviour_logprobs, (torch.float32,), (rows, columns))
    advantages = _tensor("advantages", batch.advantages, (torch.float32,), (rows,))
    staleness = None if batch.staleness is None else _tensor("staleness", batch.staleness, (torch.int64,), (rows,))
    if rows == 0 or int(prompt_len.min()) < 1:
        raise InvalidField("prompt_len", prompt_len.tolist(), "at least one sample, each with a prompt")
    if bool((mask & (torch.arange(columns) < prompt_len.unsqueeze(1))).any()):
        raise InvalidField("loss_mask", "1 inside a prompt", "0 up to prompt_len")
    counted = mask.any(dim=0).nonzero()
    length = int(counted.max()) + 1 if counted.numel() else columns
    return _Tensors(token_ids[:, :length], mask[:, :length], behaviour[:, :length], advantages, staleness)


def _tensor(name: str, array: Array, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None) -> Tensor:
    if isinstance(array, np.ndarray):
        # Arrays over received bytes are read-only, which torch does not have.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    else:
        tensor = array
    if tensor.dtype not in dtypes:
        raise InvalidField(f"{name}.dtype", tensor.dtype, " or ".join(str(dtype) for dtype in dtypes))
    if shape is not None and tuple(tensor.shape) != shape:
        raise InvalidField(f"{name}.shape", list(tensor.shape), str(list(shape)))
    return tensor


def _mean_entropy(logits: Tensor, mask: Tensor) -> float:
    """Mean over `mask` [B, T] of the entropy of the distribution that the token was drawn from, in nats."""
    logprobs = torch.log_softmax(logits[:, :-1][mask[:, 1:]].float(), dim=-1)
    if logprobs.shape[0] == 0:
        return 0.0
    return float(-(logprobs.exp() * logprobs).sum(dim=-1).mean())
