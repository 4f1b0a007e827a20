"""Further columns of a batch (routed experts, images, scores) as tensors, in the layout of the tokens.

Invariant: a column has one dtype, axis and shape over all collated groups. A ragged column may be absent from a group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from buffer_wire import layout
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_client.batch import Group
    from trainer_client.collate.facts import Chosen, Extras, Row

Fill: TypeAlias = float | Mapping[str, float]
"""Fill of a column per token where there is no token: one number, or one by the column's name (else 0)."""

_REQUIRED = frozenset(name for name, _ in layout.REQUIRED_COLUMNS)
_TORCH_DTYPES: dict[int, str] = {number: word for word, number in words(pb.DType).items()}
"""Name in torch of each dtype on the wire."""


class Ragged(NamedTuple):
    """Ragged column: the rows of all samples end to end, a different number for each sample."""

    values: "Tensor"
    """Rows of all samples, [rows, …]."""
    offsets: "Tensor"
    """Boundaries of the samples, int64 [B + 1]; sample i has the rows from offsets[i] up to offsets[i + 1]."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of a column, on which all groups agree: dtype, axis and item shape."""

    dtype: int
    """Number of the dtype on the wire."""
    axis: int
    item_shape: tuple[int, ...]

    def __str__(self) -> str:
        axis = pb.Axis.Name(self.axis).removeprefix("AXIS_").lower()  # type: ignore[arg-type]
        return f"{_TORCH_DTYPES[self.dtype]} {list(self.item_shape)} per {axis}"


def kinds_of(groups: "Sequence[Group]", wanted: "Extras") -> dict[str, Kind]:
    """Find the wanted columns of the groups, with their kinds; {} where there are no groups.

    Raises InvalidField for an unknown name, for a column that only some groups have, and for one whose kinds differ.
    """
    if not groups or not wanted:
        return {}
    if isinstance(wanted, str) and wanted != "all":
        raise InvalidField("extras", wanted, "a sequence of names, or 'all'")
    distinct = {id(group): group for group in groups}.values()
    by_group = [
        {c.name: Kind(c.dtype, c.axis, tuple(c.item_shape)) for c in group.header.columns if c.name not in _REQUIRED}
        for group in distinct
    ]
    known = {name: kind for kinds in by_group for name, kind in kinds.items()}
    names = list(known) if wanted == "all" else wanted
    for name in names:
        if name not in known:
            raise InvalidField("extras", name, "one of " + (", ".join(sorted(known)) or "none: there are no extras"))
        for group, kinds in zip(distinct, by_group, strict=True):
            kind = kinds.get(name)
            if kind is None and known[name].axis != pb.AXIS_RAGGED:
                raise InvalidField(f"extras[{name}]", f"absent from task {group.task_id!r}", "a column of every group")
            if kind is not None and kind != known[name]:
                limit = f"{known[name]}, as in other groups"
                raise InvalidField(f"extras[{name}]", f"{kind} in task {group.task_id!r}", limit)
    return {name: known[name] for name in names}


def named_tensors(
    of: "Chosen", kinds: Mapping[str, Kind], shape: tuple[int, ...], rows: "Sequence[Row]", *, fill: Fill, pin: bool
) -> "dict[str, Tensor | Ragged]":
    """Make tensors of the columns: per token `shape` + item shape, per sample [B] + item shape, ragged as `Ragged`."""
    fills = fill if isinstance(fill, Mapping) else dict.fromkeys(kinds, fill)
    made: dict[str, Tensor | Ragged] = {}
    for name, kind in kinds.items():
        if kind.axis == pb.AXIS_RAGGED:
            made[name] = _ragged(of, name, kind, pin=pin)
            continue
        per_token = kind.axis == pb.AXIS_TOKEN
        lead = shape if per_token else (len(of.samples),)
        tensor, out = _full(name, kind, lead, fills.get(name, 0) if per_token else 0, pin=pin)
        for i, sample in enumerate(of.samples):
            out[rows[i] if per_token else i] = sample.extras[name]
        made[name] = tensor
    return made


def _ragged(of: "Chosen", name: str, kind: Kind, *, pin: bool) -> Ragged:
    import torch

    arrays = [sample.extras.get(name) for sample in of.samples]
    ends = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)])
    values, out = _full(name, kind, (int(ends[-1]),), 0, pin=pin)
    for i, array in enumerate(arrays):
        if array is not None:
            out[ends[i] : ends[i + 1]] = array
    return Ragged(values, torch.tensor(ends.tolist(), dtype=torch.int64, pin_memory=pin))


def _full(
    name: str, kind: Kind, lead: tuple[int, ...], fill: float, *, pin: bool
) -> "tuple[Tensor, npt.NDArray[np.generic]]":
    """Make a tensor of the fill, and a view of its memory in the dtype that the column has on the wire."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[kind.dtype])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if not (math.isfinite(fill) and fill == int(fill) and info.min <= fill <= info.max):
            raise InvalidField(f"extras_fill[{name}]", fill, f"a whole number from {info.min} to {info.max}")
        fill = int(fill)
    tensor = torch.full((*lead, *kind.item_shape), fill, dtype=dtype, pin_memory=pin)
    # numpy has no bfloat16; its bits travel as uint16.
    bits = tensor.view(torch.uint16) if kind.dtype == pb.D_TYPE_BFLOAT16 else tensor
    return tensor, bits.numpy()
