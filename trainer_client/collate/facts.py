"""Facts that both layouts share: of samples and of the step. Also the choice of samples, and tensors of tokens."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, BatchInfo, Group, Sample
from trainer_client.collate.named import Ragged

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Advantages: TypeAlias = Union["Tensor", npt.NDArray[np.generic], Sequence[float], Sequence["Tensor | Sequence[float]"]]
"""Advantages, float: [B], one per sample, or B arrays of [T], one number per token."""

Extras: TypeAlias = Sequence[str] | Literal["all"]
"""Names of further columns, or "all"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collated:
    """Collated samples, B of them, with the facts of their step."""

    rewards: "Tensor"
    """Rewards, float32 [B]."""
    group_index: "Tensor"
    """Index of the chosen group that a sample belongs to, int64 [B], from 0; in a micro-batch still of the whole."""
    sample_index: "Tensor"
    """Index of the sample among the chosen ones, int64 [B], from 0; in a micro-batch still of the whole."""
    prompt_len: "Tensor"
    """Lengths of the prompts in tokens, int64 [B]."""
    lengths: "Tensor"
    """Lengths T of the samples, prompt and response, in tokens, int64 [B]."""
    staleness: "Tensor"
    """Staleness of each sample's group in versions, int64 [B]."""
    trajectory_index: "Tensor"
    """Index of the sample's trajectory among those of all chosen, int64 [B], from 0; in a micro-batch of the whole."""
    policy_index: "Tensor"
    """Index of the policy that wrote the sample, int64 [B], by name; all 0 where there is one."""
    trajectory_loss_tokens: "Tensor"
    """Loss tokens of all rows of the sample's trajectory, int64 [B]."""
    sample_advantages: "Tensor | None" = None
    """Advantages per sample, float32 [B]; None unless they were given so."""
    extras: "Mapping[str, Tensor | Ragged]" = field(default_factory=dict)
    """Further columns that were asked for, by name."""
    step: int
    train_version: int
    total_groups: int
    """Groups of the step over all ranks and up to this micro-batch; so are the totals below."""
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    total_trajectories: int
    """Trajectories with a row that is trainable; 0 where the service does not count them, and samples are rows."""
    final: bool = True
    """True when the totals are the step's own."""

    def to(self, device: "torch.device | str", *, non_blocking: bool = False) -> Self:
        """Copy the batch with its tensors on `device`; `non_blocking` helps from pinned memory only."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy the batch into page-locked memory; a DataLoader with pin_memory=True calls this.

        `pin_memory=True` of `collate`, `pack` and `micro_batches` saves the copy. Raises torch's error without CUDA.
        """
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: "Callable[[Tensor], Tensor]") -> Self:
        changed: dict[str, object] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "extras":
                changed["extras"] = {
                    name: Ragged(change(extra.values), change(extra.offsets))
                    if isinstance(extra, Ragged)
                    else change(extra)
                    for name, extra in value.items()
                }
            elif hasattr(value, "pin_memory"):
                changed[each.name] = change(value)
        return replace(self, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choice of samples that become one collated batch, in order, with their groups, indices and advantages."""

    info: BatchInfo
    samples: Sequence[Sample]
    groups: Sequence[Group]
    """Group of each sample."""
    group_index: Sequence[int]
    sample_index: Sequence[int]
    trajectory_index: Sequence[int]
    policy_index: Sequence[int]
    trajectory_loss_tokens: Sequence[int]
    sample_advantages: Sequence[float] | None = None
    token_advantages: Sequence[npt.NDArray[np.float32]] | None = None

    def part(self, indices: Sequence[int]) -> "Chosen":
        """Select some of the samples, with everything chosen for them."""

        def of(values: Sequence[object] | None) -> list[object] | None:
            return None if values is None else [values[i] for i in indices]

        return Chosen(
            self.info,
            of(self.samples),  # type: ignore[arg-type]
            of(self.groups),  # type: ignore[arg-type]
            of(self.group_index),  # type: ignore[arg-type]
            of(self.sample_index),  # type: ignore[arg-type]
            of(self.trajectory_index),  # type: ignore[arg-type]
            of(self.policy_index),  # type: ignore[arg-type]
            of(self.trajectory_loss_tokens),  # type: ignore[arg-type]
            of(self.sample_advantages),  # type: ignore[arg-type]
            of(self.token_advantages),  # type: ignore[arg-type]
        )

    @property
    def lengths(self) -> list[int]:
        """Length T of each sample."""
        return [sample.tokens for sample in self.samples]

    def write_advantages(self, i: int, out: npt.NDArray[np.generic]) -> None:
        """Write sample i's advantages into `out`, float [T] of zeros.

        A number given for the whole sample goes to its tokens that count in the loss. So a loss that forgets the mask
        does not train on prompts.
        """
        if self.token_advantages is not None:
            out[:] = self.token_advantages[i]
        elif self.sample_advantages is not None:
            np.multiply(self.samples[i].loss_mask, np.float32(self.sample_advantages[i]), out=out)


def chosen(batch: Batch, groups: Sequence[Group] | None, advantages: Advantages | None, *, rows: bool) -> Chosen:
    """Choose the samples of `groups` (None: all of the batch), group after group; those that are not trainable are left
    out.

    Raises InvalidField for `advantages`, and for rows of trajectories unless `rows`.
    """
    taken = batch.groups if groups is None else groups
    if not rows:
        for group in taken:
            group.refuse_rows("take rows=True, and the advantages by trajectory")
    picked = [(i, group, sample) for i, group in enumerate(taken) for sample in group.samples if sample.trainable]
    samples = [sample for _, _, sample in picked]
    of_samples, of_tokens = _advantages(advantages, samples)
    keys = [(i, sample.trajectory) for i, _, sample in picked]
    trajectories = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    policies = {name: number for number, name in enumerate(sorted({sample.policy for sample in samples}))}
    loss_tokens: Counter[tuple[int, int]] = Counter()
    for key, sample in zip(keys, samples, strict=True):
        loss_tokens[key] += sample.loss_tokens
    return Chosen(
        batch.info,
        samples,
        [group for _, group, _ in picked],
        [i for i, _, _ in picked],
        range(len(samples)),
        [trajectories[key] for key in keys],
        [policies[sample.policy] for sample in samples],
        [loss_tokens[key] for key in keys],
        of_samples,
        of_tokens,
    )


def facts_of(of: Chosen, *, pin: bool) -> dict[str, object]:
    """Make the fields of `Collated`, except extras."""
    torch = torch_for("collate")

    def tensor(values: Sequence[float], dtype: object) -> "Tensor":
        return torch.tensor(values, dtype=dtype, pin_memory=pin)  # type: ignore[no-any-return]

    info, whole = of.info, torch.int64
    return {
        "rewards": tensor([sample.reward for sample in of.samples], torch.float32),
        "group_index": tensor(of.group_index, whole),
        "sample_index": tensor(list(of.sample_index), whole),
        "trajectory_index": tensor(of.trajectory_index, whole),
        "policy_index": tensor(of.policy_index, whole),
        "trajectory_loss_tokens": tensor(of.trajectory_loss_tokens, whole),
        "prompt_len": tensor([sample.prompt_len for sample in of.samples], whole),
        "lengths": tensor(of.lengths, whole),
        "staleness": tensor([group.staleness for group in of.groups], whole),
        "sample_advantages": None if of.sample_advantages is None else tensor(of.sample_advantages, torch.float32),
        "step": info.step,
        "train_version": info.train_version,
        "total_groups": info.total_groups,
        "total_samples": info.total_samples,
        "total_tokens": info.total_tokens,
        "total_loss_tokens": info.total_loss_tokens,
        "total_trajectories": info.total_trajectories
        or (0 if any(group.has_rows for group in of.groups) else info.total_samples),
        "final": info.final,
    }


Row: TypeAlias = slice | tuple[int, slice]
"""Index of a sample's tokens in a tensor of tokens."""


def token_tensors(
    of: Chosen, shape: tuple[int, ...], rows: Sequence[Row], *, pad_token_id: int, pin: bool
) -> "dict[str, Tensor]":
    """Make the tensors of tokens that both layouts have, of the given shape, each sample's numbers in its row."""
    torch = torch_for("collate")
    fills = {
        "token_ids": (pad_token_id, torch.int64),
        "position_ids": (0, torch.int64),
        "loss_mask": (False, torch.bool),
        "logprobs": (0.0, torch.float32),
        "versions": (-1, torch.int64),
    }
    if of.sample_advantages is not None or of.token_advantages is not None:
        fills["advantages"] = (0.0, torch.float32)
    tensors = {name: torch.full(shape, fill, dtype=dtype, pin_memory=pin) for name, (fill, dtype) in fills.items()}
    out = {name: tensor.numpy() for name, tensor in tensors.items()}
    positions = np.arange(max(of.lengths, default=0))
    for i, (sample, row) in enumerate(zip(of.samples, rows, strict=True)):
        out["token_ids"][row] = sample.token_ids
        out["position_ids"][row] = positions[: sample.tokens]
        out["loss_mask"][row] = sample.loss_mask
        out["logprobs"][row] = sample.logprobs
        sample.write_versions(out["versions"][row])
        if "advantages" in out:
            of.write_advantages(i, out["advantages"][row])
    return tensors


def torch_for(function: str) -> ModuleType:
    """Import torch. Raises ImportError that says what to install."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"trainer_client.{function} needs torch, which is not installed: pip install 'rollout-buffer[torch]'"
        ) from error
    return torch


def at_least_one(name: str, value: int) -> None:
    """Raise InvalidField for a number below 1."""
    if value < 1:
        raise InvalidField(name, value, "at least 1")


def _advantages(
    given: Advantages | None, samples: Sequence[Sample]
) -> tuple[list[float] | None, list[npt.NDArray[np.float32]] | None]:
    """Split advantages into those per sample and those per token; at most one of the two is not None."""
    if given is None:
        return None, None
    if hasattr(given, "detach"):
        given = _numbers(given)  # At once: a transfer from a device for each sample would be slow.
    if len(given) != len(samples):
        raise InvalidField("advantages", f"{len(given)} of them", f"{len(samples)}, one for each sample")
    arrays = [_numbers(each) for each in given]
    if all(array.ndim == 0 for array in arrays):
        return [float(array) for array in arrays], None
    for i, (array, sample) in enumerate(zip(arrays, samples, strict=True)):
        if array.shape != (sample.tokens,):
            raise InvalidField(f"advantages[{i}]", list(array.shape), f"[{sample.tokens}], a number for each token")
    return None, arrays


def _numbers(value: object) -> npt.NDArray[np.float32]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    return np.asarray(value, np.float32)
