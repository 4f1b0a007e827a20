"""Sharded weights: spread over the ranks of a trainer, made whole one tensor at a time.

Supports FSDP2 (`fully_shard`), tensor parallelism and whatever else holds DTensors; FSDP1's sharded state dicts. All
ranks call `session.publish(model)`. Without a session that is:

    weights = ShardedWeights(model)
    with weights.gathering(leads=rank == 0):
        if rank == 0:
            publisher.offer(weights, publication)

One rank leads. It publishes, and tells the others which tensor to gather next, until it tells them that it is done or
why it failed. So it may go over the tensors as often as it needs to, and end in the middle.

Invariants: every rank is in the same collective or in none. One gathered tensor exists at a time, except for those that
the leader's consumer keeps. A failure of the leader is raised on every rank. No wait is longer than the timeout of the
process group.

Follows torch 2.13's `DTensor.full_tensor` and `get_model_state_dict` (torch.distributed.checkpoint.state_dict); needs
torch 2.4 or later.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

from buffer_wire.errors import InvalidField
from trainer_client.publish.collective.plan import TensorSpec
from trainer_client.publish.publication import WeightSource
from trainer_client.publish.ranks import DONE, FAILED, PublishFailed, RankReport, Ranks, device_of, shown

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.nn import Module

    from trainer_client.publish.publication import TensorSource


class ShardedWeights:
    """Weights of `source`, sharded over ranks: a source for every publisher, to be used many times.

    `source`: a module, a state dict, or a function that gives names and tensors; equal on every rank, read when a
    gathering begins. `group`: the ranks that hold the shards, by default all. `dtype`: floating-point tensors are cast
    to it before they are gathered.
    """

    def __init__(
        self,
        source: "TensorSource",
        *,
        group: "dist.ProcessGroup | None" = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidField("dtype", dtype, "a floating-point dtype, or None")
        if not (isinstance(source, Mapping) or callable(source)):
            raise InvalidField(
                "source", type(source).__name__, "a module, a state dict, or a function that gives named tensors"
            )
        self._source = source
        self._given_group = group
        self._dtype = dtype
        self._parts: list[tuple[str, Tensor]] = []
        """Names of the tensors and this rank's part of each, while a gathering is under way."""
        self._ranks: Ranks | None = None
        self._leading = False

    @property
    def under_way(self) -> bool:
        """True on a rank that is within `gathering`."""
        return self._ranks is not None

    # ── every rank ───────────────────────────────────────────────────────────

    @contextmanager
    def gathering(self, *, leads: bool) -> Iterator[Self]:
        """Take part in one publish. The body of the rank that `leads` publishes; the others' runs after it has.

        Waits for all ranks of the group. Raises InvalidField, on all ranks, unless one of them leads and all have the
        same tensors. What the leader's body raises is raised on the others too: the project's own errors as they are,
        others as PublishFailed.
        """
        if self.under_way:
            raise InvalidField("source", "being gathered already", "gathered once at a time")
        self._ranks, self._leading = Ranks(self._given_group), leads
        try:
            self._agree(self._ranks)
            if leads:
                yield from self._lead(self._ranks)
            else:
                self._follow(self._ranks)
                self._parts = []
                yield self
        finally:
            self._ranks, self._leading, self._parts = None, False, []

    def participate(self) -> None:
        """Take part as a rank that only gathers; returns when the leader has published. Raises as `gathering`."""
        with self.gathering(leads=False):
            pass

    # ── the leader's publisher ───────────────────────────────────────────────

    def specs(self) -> tuple[TensorSpec, ...]:
        """List the specs of the tensors that will be given, in order; gathers nothing."""
        self._check_leading()
        return tuple(_spec(name, part, self._dtype) for name, part in self._parts)

    @property
    def on_gpu(self) -> bool:
        """True when the gathered tensors are on a GPU, judged by the first one."""
        return bool(self._parts) and device_of(self._parts[0][1]).type == "cuda"

    def __call__(self) -> Iterator[tuple[str, "Tensor"]]:
        """Yield names and whole tensors, each gathered when it is asked for; let it go before the next one."""
        ranks = self._check_leading()
        for index, (name, part) in enumerate(self._parts):
            if _is_spread(part):
                ranks.tell(index)
            yield name, self._whole(ranks, index)

    # ── inside ───────────────────────────────────────────────────────────────

    def _check_leading(self) -> "Ranks":
        if self._ranks is None or not self._leading:
            limit = "published within `with weights.gathering(leads=rank == 0)`, by the rank that leads"
            raise InvalidField("source", "ShardedWeights", limit)
        return self._ranks

    def _agree(self, ranks: "Ranks") -> None:
        """Read the source, and raise an error on any rank as an error on all ranks."""
        error: Exception | None = None
        try:
            self._parts = _parts_of(self._source)
            specs = [_spec(name, part, self._dtype) for name, part in self._parts]
        except Exception as caught:  # noqa: BLE001 - raised below, when the others know
            error, specs = caught, []
        digest = hashlib.sha256(repr(specs).encode()).hexdigest()
        told = shown(error) if error is not None else ""
        reports = ranks.exchange(RankReport(self._leading, digest, told))
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report.error:
                raise PublishFailed(f"rank {rank} cannot take part in the publish: {report.error}")
        leaders = [rank for rank, report in enumerate(reports) if report.leads]
        if len(leaders) != 1:
            raise InvalidField("leads", f"true on ranks {leaders}", "true on one rank of the group")
        ranks.leader = leaders[0]
        others = [r for r, report in enumerate(reports) if report.tensors != reports[ranks.leader].tensors]
        if others:
            limit = f"the same tensors, in the same order, on ranks {others} as on rank {ranks.leader}"
            raise InvalidField("source", f"{len(specs)} tensors on rank {ranks.rank}", limit)

    def _lead(self, ranks: "Ranks") -> Iterator[Self]:
        try:
            yield self
        except BaseException as error:
            ranks.tell_failure(error)
            raise
        ranks.tell(DONE)

    def _follow(self, ranks: "Ranks") -> None:
        while (told := ranks.told()) >= 0:
            self._whole(ranks, told)
        if told == FAILED:
            raise ranks.told_failure()

    def _whole(self, ranks: "Ranks", index: int) -> "Tensor":
        part = self._parts[index][1].detach()
        if self._dtype is not None and part.is_floating_point():
            part = part.to(self._dtype)
        return ranks.gather(part) if _is_spread(part) else part


def is_sharded(source: object) -> bool:
    """True when every rank has to take part for `source` to be published. A function cannot be judged; False."""
    if isinstance(source, ShardedWeights):
        return True
    if isinstance(source, Mapping):
        return any(_is_spread(value) for value in source.values())
    if not hasattr(source, "state_dict") or not hasattr(source, "parameters"):
        return False
    return any(_is_spread(parameter) for parameter in source.parameters()) or _has_fsdp1(source)


@contextmanager
def published_by(source: WeightSource, *, leads: bool) -> Iterator[WeightSource]:
    """Give `source` in the form that a publisher takes. If it is sharded, every rank takes part.

    The body of the rank that `leads` publishes. Raises as `ShardedWeights.gathering`.
    """
    if not is_sharded(source):
        yield source
        return
    weights = source if isinstance(source, ShardedWeights) else ShardedWeights(source)  # type: ignore[arg-type]
    if weights.under_way:
        # The caller has begun it, on all ranks.
        yield weights
        return
    with weights.gathering(leads=leads):
        yield weights


def _parts_of(source: "TensorSource") -> "list[tuple[str, Tensor]]":
    """List names and this rank's part of each tensor. Raises InvalidField for anything but a tensor, or one given
    twice.
    """
    import torch

    items: Iterable[tuple[str, Tensor]]
    if isinstance(source, Mapping):
        items = source.items()
    elif isinstance(source, torch.nn.Module):
        items = _state_of(source).items()
    else:
        items = source()
    parts: dict[str, Tensor] = {}
    for name, part in cast("Iterable[tuple[object, Any]]", items):  # whatever the function gives
        if not (isinstance(name, str) and (isinstance(part, torch.Tensor) or _is_spread(part))):
            raise InvalidField(f"source[{name!r}]", type(part).__name__, "a tensor, under a name")
        if name in parts:
            raise InvalidField(f"source[{name!r}]", "given twice", "given once")
        parts[name] = part
    if not parts:
        raise InvalidField("source", "empty", "at least one tensor")
    return list(parts.items())


def _state_of(module: "Module") -> "Mapping[str, Tensor]":
    """Read the sharded state dict, under the names of the module without its wrappers; gathers nothing for FSDP2."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(module)  # type: ignore[return-value]  # no optimizer states, so only tensors


def _is_spread(part: object) -> bool:
    """True for a DTensor (full_tensor), or a ShardedTensor of torch.distributed._shard (local_shards)."""
    return hasattr(part, "full_tensor") or hasattr(part, "local_shards")


def _has_fsdp1(module: Any) -> bool:  # noqa: ANN401 - a module
    # A module of it can only exist where this is imported already.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules())


def _spec(name: str, part: "Tensor", dtype: "torch.dtype | None") -> TensorSpec:
    given = dtype if dtype is not None and part.dtype.is_floating_point else part.dtype
    return TensorSpec(name, str(given).removeprefix("torch."), tuple(part.size()))
