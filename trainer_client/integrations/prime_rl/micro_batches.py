"""Micro-batches of a step's groups, each of at most seq_len tokens, as many for each data rank.

Contract followed: `prepare_batch` of prime-rl 559b447 with the zero advantages filtered, its default, and no images.
First fit by falling length. Position ids begin anew with every rollout. Log-probabilities, advantages, temperatures and
weights are one per token, in the token's own place. A rollout longer than seq_len is cut at its end. Padding belongs to
the last rollout of its micro-batch and has no loss. Ranks are balanced by tokens.

Invariant: equal groups and packing give equal micro-batches, so that a step that is replayed is written again as it
was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from buffer_wire.errors import InvalidField
from buffer_wire.layout import Array
from trainer_client.batch import Group, Sample

Floats: TypeAlias = npt.NDArray[np.float32]
ScalarT = TypeVar("ScalarT", bound=np.generic)

AdvantageFn: TypeAlias = Callable[[Floats, npt.NDArray[np.int64]], Floats]
"""Function of a group's rewards float32 [G] and response lengths int64 [G]: its advantages float32 [G]."""

ADVANTAGES, ROUTED_EXPERTS = "advantages", "routed_experts"
STREAMS: Mapping[str, float] = {"ref_logprobs": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0}
"""Further columns per token, with the fill for rollouts that lack them beside others that have them."""
PAD_TOKEN_ID = 1
ENVIRONMENTS = {"": "default", "all": "all_"}
"""Replacements for names that the trainer's metrics need for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Micro-batch: S tokens of some rollouts, one after another."""

    token_ids: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    advantages: Floats
    logprobs: Floats
    loss_mask: npt.NDArray[np.bool_]
    temperatures: Floats
    lengths: tuple[int, ...]
    """Length of each rollout in tokens; they add up to S."""
    environments: tuple[tuple[str, int], ...]
    """Names of environments, each with its number of tokens."""
    streams: Mapping[str, Floats] = field(default_factory=dict)
    """Columns of STREAMS that the rollouts have."""
    routed_experts: Array | None = None
    """Routed experts, [S, layers, k]; None without them."""

    @property
    def tokens(self) -> int:
        """Number of tokens S."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Options of packing. Raises InvalidField for a value out of range."""

    seq_len: int
    """Largest number of tokens of a micro-batch: the trainer's model.seq_len."""
    data_ranks: int = 1
    """Number of data ranks: the trainer's processes over its context-parallel degree."""
    pad_to_multiple_of: int = 1
    """Factor to whose multiples a micro-batch's tokens are padded: the trainer's context-parallel degree."""
    temperature: float = 1.0
    """Temperature of the sampling, as the tasks state it."""
    advantage: AdvantageFn | None = None
    """Function for advantages; None: rewards less their group's mean. A column `advantages` from the workers comes
    before either."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "data_ranks", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "at least 1")
        if self.temperature <= 0:
            raise InvalidField("temperature", self.temperature, "above 0")
        if self.seq_len % self.pad_to_multiple_of:
            limit = f"a multiple of pad_to_multiple_of, {self.pad_to_multiple_of}"
            raise InvalidField("seq_len", self.seq_len, limit)


def pack(groups: Sequence[Group], packing: Packing) -> list[list[MicroBatch]]:
    """Pack groups into micro-batches for every data rank, equally many.

    Raises InvalidField for advantages of a wrong shape, and for images.
    """
    rollouts = [rollout for group in groups for rollout in _rollouts(group, packing)]
    trained = [each for each in (_without_zero_advantages(rollout) for rollout in rollouts) if each is not None]
    # A step without a gradient is a step all the same: the trainer waits for it.
    bins = _first_fit(trained or [_blank(min(rollouts, key=lambda each: each.tokens))], packing.seq_len)
    while len(bins) % packing.data_ranks and (widest := max(bins, key=_divisible)) and len(widest) > 1:
        bins.remove(widest)
        bins += _halves(widest)
    packed = [_joined(each, packing.pad_to_multiple_of) for each in bins]
    packed += [_blank(packed[0])] * (-len(packed) % packing.data_ranks)
    return _balanced(packed, packing.data_ranks)


def group_advantages(group: Group, advantage: AdvantageFn | None) -> Floats:
    """Compute a group's advantages, float32 [G]; by default rewards less their mean.

    Of rows of trajectories: less the mean over the trajectories, of rows of the same policy; 0 where a row is not
    trainable. Raises InvalidField for a function beside these.
    """
    rewards = group.rewards
    if group.has_rows:
        if advantage is not None:
            group.refuse_rows("an advantage function is given a reward for each")
        return rewards - np.array([_baseline(group, sample) for sample in group.samples], np.float32)
    if advantage is None:
        return rewards - np.float32(rewards.mean())
    lengths = np.array([sample.tokens - sample.prompt_len for sample in group.samples], np.int64)
    given = np.asarray(advantage(rewards, lengths), np.float32)
    if given.shape != rewards.shape:
        raise InvalidField("advantage", given.shape, f"one number a rollout, {rewards.shape}")
    return given


def _baseline(group: Group, row: Sample) -> float:
    if not row.trainable:
        return row.reward
    trajectories: dict[int, list[float]] = {}
    for sample in group.samples:
        if sample.trainable and sample.policy == row.policy:
            trajectories.setdefault(sample.trajectory, []).append(sample.reward)
    return float(np.mean([np.mean(rewards) for rewards in trajectories.values()]))


# ── rollouts ─────────────────────────────────────────────────────────────────


def _rollouts(group: Group, packing: Packing) -> list[MicroBatch]:
    group.refuse_images("its micro-batches would need mm_kwargs, which this bridge does not make")
    advantages = group_advantages(group, packing.advantage)
    environment = ENVIRONMENTS.get(group.environment, group.environment)
    return [
        _rollout(sample, float(advantage), environment, packing)
        for sample, advantage in zip(group.samples, advantages, strict=True)
    ]


def _rollout(sample: Sample, advantage: float, environment: str, packing: Packing) -> MicroBatch:
    kept = min(sample.tokens, packing.seq_len)
    own = sample.extras.get(ADVANTAGES)
    experts = sample.extras.get(ROUTED_EXPERTS)
    return MicroBatch(
        token_ids=sample.token_ids[:kept],
        position_ids=np.arange(kept, dtype=np.int32),
        advantages=np.full(kept, advantage, np.float32) if own is None else own[:kept].astype(np.float32),
        logprobs=sample.logprobs[:kept],
        loss_mask=sample.loss_mask[:kept].astype(np.bool_),
        temperatures=np.full(kept, packing.temperature, np.float32),
        lengths=(kept,),
        environments=((environment, kept),),
        streams={name: sample.extras[name][:kept].astype(np.float32) for name in STREAMS if name in sample.extras},
        routed_experts=None if experts is None else experts[:kept],
    )


def _without_zero_advantages(rollout: MicroBatch) -> MicroBatch | None:
    """Remove tokens without advantage from the policy gradient and its denominator; None where no loss is left."""
    weights = rollout.streams.get("rl_weights", rollout.loss_mask.astype(np.float32))
    idle = rollout.loss_mask & (rollout.advantages == 0.0) & (weights != 0.0)
    weights = np.where(idle, np.float32(0.0), weights)
    others = (rollout.streams[name] for name in ("ce_weights", "ref_kl_weights") if name in rollout.streams)
    if not (rollout.loss_mask & (weights != 0.0)).any() and not any(stream.any() for stream in others):
        return None
    return replace(rollout, streams={**rollout.streams, "rl_weights": weights}) if idle.any() else rollout


def _blank(source: MicroBatch) -> MicroBatch:
    """Copy the tokens without any loss: every rank has to run as many forward passes, of equal kind."""
    kept = {"ref_logprobs": source.streams["ref_logprobs"]} if "ref_logprobs" in source.streams else {}
    return replace(
        source,
        advantages=np.zeros_like(source.advantages),
        loss_mask=np.zeros_like(source.loss_mask),
        streams=kept,
    )


# ── packing ──────────────────────────────────────────────────────────────────


def _first_fit(rollouts: Sequence[MicroBatch], seq_len: int) -> list[list[MicroBatch]]:
    bins: list[list[MicroBatch]] = []
    room: list[int] = []
    for rollout in sorted(rollouts, key=lambda each: -each.tokens):
        for i, each in enumerate(bins):
            if rollout.tokens <= room[i] and (each[0].routed_experts is None) == (rollout.routed_experts is None):
                each.append(rollout)
                room[i] -= rollout.tokens
                break
        else:
            bins.append([rollout])
            room.append(seq_len - rollout.tokens)
    return bins


def _tokens(rollouts: Sequence[MicroBatch]) -> int:
    return sum(rollout.tokens for rollout in rollouts)


def _divisible(rollouts: Sequence[MicroBatch]) -> int:
    return _tokens(rollouts) if len(rollouts) > 1 else 0


def _halves(rollouts: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    halves: list[list[MicroBatch]] = [[], []]
    for rollout in rollouts:
        min(halves, key=_tokens).append(rollout)
    return halves


def _joined(parts: Sequence[MicroBatch], multiple_of: int) -> MicroBatch:
    padding = -_tokens(parts) % multiple_of
    lengths = [rollout.tokens for rollout in parts]
    lengths[-1] += padding
    named = [name for name in STREAMS if any(name in part.streams for part in parts)]
    return MicroBatch(
        token_ids=_column([part.token_ids for part in parts], padding, PAD_TOKEN_ID),
        position_ids=np.concatenate([*(part.position_ids for part in parts), np.arange(padding, dtype=np.int32)]),
        advantages=_column([part.advantages for part in parts], padding),
        logprobs=_column([part.logprobs for part in parts], padding),
        loss_mask=_column([part.loss_mask for part in parts], padding),
        temperatures=_column([part.temperatures for part in parts], padding, 1.0),
        lengths=tuple(lengths),
        environments=tuple(run for part in parts for run in part.environments) + ((("", padding),) if padding else ()),
        streams={name: _column([_stream(part, name) for part in parts], padding) for name in named},
        routed_experts=_experts(parts, padding),
    )


def _column(parts: Sequence[npt.NDArray[ScalarT]], padding: int, fill: float = 0) -> npt.NDArray[ScalarT]:
    return np.concatenate([*parts, np.full(padding, fill, parts[0].dtype)])


def _stream(rollout: MicroBatch, name: str) -> Floats:
    return rollout.streams.get(name, np.full(rollout.tokens, STREAMS[name], np.float32))


def _experts(parts: Sequence[MicroBatch], padding: int) -> Array | None:
    columns = [part.routed_experts for part in parts if part.routed_experts is not None]
    if not columns:
        return None
    return np.concatenate([*columns, np.zeros((padding, *columns[0].shape[1:]), columns[0].dtype)])


def _balanced(packed: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Distribute equally many to each rank: the heaviest first, each to the lightest rank that has room."""
    shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for each in sorted(packed, key=lambda each: -each.tokens):
        open_shares = [share for share in shares if len(share) < len(packed) // ranks]
        min(open_shares, key=_tokens).append(each)
    return shares
