"""Rollouts of a shard, packed into micro-batches of at most seq_len tokens.

Contract followed: `prepare_batch` and TensorMicroBatch of PRIME-RL v0.5.0. First fit by falling length; position ids
begin anew with every rollout; log-probabilities, advantages and temperatures are one a token, on the token's own place;
a rollout longer than seq_len is cut at its end. Not there: images, teachers, several LoRA adapters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from buffer_wire.errors import InvalidField
from buffer_wire.layout import Array
from trainer_client.batch import Batch, Group, Sample

if TYPE_CHECKING:
    from torch import Tensor

AdvantageFn: TypeAlias = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""Advantages float32 [G] of a group's rewards float32 [G] and response lengths int64 [G]."""

ROUTED_EXPERTS = "routed_experts"
PAD_TOKEN_ID = 1
"""What v0.5.0 pads with; masked."""


class TensorMicroBatch(TypedDict):
    """S tokens of some rollouts, one after another, as v0.5.0's trainer takes them."""

    input_ids: "Tensor"
    """int64 [1, S]"""
    position_ids: "Tensor"
    """int64 [1, S], from 0 in every rollout."""
    advantages: "Tensor"
    """float32 [1, S]"""
    inference_logprobs: "Tensor"
    """float32 [1, S], of the policy that generated the token; 0 where the mask is."""
    teacher_logprobs: None
    loss_mask: "Tensor"
    """bool [1, S]"""
    temperatures: "Tensor"
    """float32 [1, S]"""
    lora_num_tokens: "Tensor"
    """int32 [1]: S."""
    routed_experts: "Tensor | None"
    """int32 [1, S, layers, k] where the workers sent that column."""
    pixel_values: None
    image_grid_thw: None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The same as arrays [S]."""

    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.bool_]
    temperatures: npt.NDArray[np.float32]
    routed_experts: Array | None = None
    """[S, layers, k]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How to pack. See PrimeRLConfig."""

    seq_len: int
    pad_to_multiple_of: int = 1
    temperature: float | Callable[[Group], float] = 1.0
    advantage: AdvantageFn | None = None

    def dummy(self) -> MicroBatch:
        """A micro-batch without loss, for a rank that has fewer than another."""
        tokens = self.pad_to_multiple_of
        return _padding(tokens)


@dataclass
class _Bin:
    tokens: int = 0
    rollouts: list[MicroBatch] = field(default_factory=list)


def pack(batch: Batch, packing: Packing) -> list[MicroBatch]:
    """The shard's rollouts as micro-batches. Raises InvalidField for advantages of a wrong shape."""
    rollouts = [rollout for group in batch.groups for rollout in _rollouts(group, packing)]
    rollouts.sort(key=lambda rollout: -len(rollout.token_ids))
    bins: list[_Bin] = []
    for rollout in rollouts:
        tokens = len(rollout.token_ids)
        fitting = next((each for each in bins if each.tokens + tokens <= packing.seq_len), None)
        if fitting is None:
            bins.append(fitting := _Bin())
        fitting.tokens += tokens
        fitting.rollouts.append(rollout)
    return [_joined(each, packing.pad_to_multiple_of) for each in bins]


def group_advantages(group: Group, advantage: AdvantageFn | None) -> npt.NDArray[np.float32]:
    """float32 [G]; by default rewards less their mean, as v0.5.0's default_advantage_fn."""
    rewards = group.rewards
    if advantage is None:
        return rewards - np.float32(rewards.mean())
    lengths = np.array([sample.tokens - sample.prompt_len for sample in group.samples], np.int64)
    given = np.asarray(advantage(rewards, lengths), np.float32)
    if given.shape != rewards.shape:
        raise InvalidField("advantage", given.shape, f"one number a rollout, {rewards.shape}")
    return given


def _rollouts(group: Group, packing: Packing) -> list[MicroBatch]:
    advantages = group_advantages(group, packing.advantage)
    temperature = packing.temperature(group) if callable(packing.temperature) else packing.temperature
    return [
        _rollout(sample, float(advantage), temperature, packing.seq_len)
        for sample, advantage in zip(group.samples, advantages, strict=True)
    ]


def _rollout(sample: Sample, advantage: float, temperature: float, seq_len: int) -> MicroBatch:
    kept = min(sample.tokens, seq_len)
    experts = sample.extras.get(ROUTED_EXPERTS)
    return MicroBatch(
        token_ids=sample.token_ids[:kept].astype(np.int64),
        position_ids=np.arange(kept, dtype=np.int64),
        advantages=np.full(kept, advantage, np.float32),
        logprobs=sample.logprobs[:kept].astype(np.float32),
        loss_mask=sample.loss_mask[:kept].astype(np.bool_),
        temperatures=np.full(kept, temperature, np.float32),
        routed_experts=None if experts is None else experts[:kept],
    )


def _joined(packed: _Bin, multiple_of: int) -> MicroBatch:
    parts = packed.rollouts
    if missing := -packed.tokens % multiple_of:
        parts = [*parts, _padding(missing)]
    return MicroBatch(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        position_ids=np.concatenate([part.position_ids for part in parts]),
        advantages=np.concatenate([part.advantages for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        temperatures=np.concatenate([part.temperatures for part in parts]),
        routed_experts=_experts(packed.rollouts, missing),
    )


def _experts(rollouts: Sequence[MicroBatch], padding: int) -> Array | None:
    """Of all rollouts, or of none: the trainer cannot replay a part."""
    columns = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    if len(columns) < len(rollouts):
        return None
    return np.concatenate([*columns, np.zeros((padding, *columns[0].shape[1:]), columns[0].dtype)])


def _padding(tokens: int) -> MicroBatch:
    return MicroBatch(
        token_ids=np.full(tokens, PAD_TOKEN_ID, np.int64),
        position_ids=np.arange(tokens, dtype=np.int64),
        advantages=np.zeros(tokens, np.float32),
        logprobs=np.zeros(tokens, np.float32),
        loss_mask=np.zeros(tokens, np.bool_),
        temperatures=np.ones(tokens, np.float32),
    )


def to_tensors(packed: MicroBatch) -> TensorMicroBatch:
    """The micro-batch as the trainer takes it. Raises ImportError when torch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "trainer_client.integrations.prime_rl needs torch, which is not installed: "
            "pip install 'rollout-buffer[torch]'"
        ) from error
    experts = packed.routed_experts
    return TensorMicroBatch(
        input_ids=torch.from_numpy(packed.token_ids)[None],
        position_ids=torch.from_numpy(packed.position_ids)[None],
        advantages=torch.from_numpy(packed.advantages)[None],
        inference_logprobs=torch.from_numpy(packed.logprobs)[None],
        teacher_logprobs=None,
        loss_mask=torch.from_numpy(packed.loss_mask)[None],
        temperatures=torch.from_numpy(packed.temperatures)[None],
        lora_num_tokens=torch.tensor([len(packed.token_ids)], dtype=torch.int32),
        routed_experts=None if experts is None else torch.from_numpy(experts.astype(np.int32))[None],
        pixel_values=None,
        image_grid_thw=None,
    )
