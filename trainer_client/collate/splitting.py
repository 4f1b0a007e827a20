"""Splitting of a shard into micro-batches of at most a given number of tokens, without cutting a sample.

First-fit-decreasing fixes the number of parts. Their size is made as equal as the smallest bound allows that gives no
more parts (MULTIFIT: Coffman, Garey and Johnson, SIAM J. Comput. 7, 1978). Equal samples give equal parts: nothing is
drawn.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, overload

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch, Group
from trainer_client.collate.facts import Advantages, Chosen, Extras, chosen, torch_for
from trainer_client.collate.named import Fill, kinds_of
from trainer_client.collate.packed import PackedBatch, PackedLayout
from trainer_client.collate.padded import PaddedBatch, PaddedLayout, PadSide

Layout: TypeAlias = Literal["padded", "packed"]
Parts: TypeAlias = list[list[int]]

_PRECISION = 128
"""Resolution of the search for the bound: one part in this many."""


@overload
def micro_batches(
    batch: Batch,
    *,
    max_tokens: int,
    layout: Literal["packed"] = ...,
    groups: Sequence[Group] | None = ...,
    rows: bool = ...,
    pad_token_id: int = ...,
    pad_side: PadSide = ...,
    multiple_of: int = ...,
    advantages: Advantages | None = ...,
    extras: Extras = ...,
    extras_fill: Fill = ...,
    pin_memory: bool = ...,
) -> list[PackedBatch]: ...
@overload
def micro_batches(
    batch: Batch,
    *,
    max_tokens: int,
    layout: Literal["padded"],
    groups: Sequence[Group] | None = ...,
    rows: bool = ...,
    pad_token_id: int = ...,
    pad_side: PadSide = ...,
    multiple_of: int = ...,
    advantages: Advantages | None = ...,
    extras: Extras = ...,
    extras_fill: Fill = ...,
    pin_memory: bool = ...,
) -> list[PaddedBatch]: ...
def micro_batches(  # noqa: PLR0913 - options of the layouts
    batch: Batch,
    *,
    max_tokens: int,
    layout: Layout = "packed",
    groups: Sequence[Group] | None = None,
    rows: bool = False,
    pad_token_id: int = 0,
    pad_side: PadSide = "right",
    multiple_of: int = 1,
    advantages: Advantages | None = None,
    extras: Extras = (),
    extras_fill: Fill = 0,
    pin_memory: bool = False,
) -> list[PackedBatch] | list[PaddedBatch]:
    """Cut the samples of `groups` (default: all of the batch) into batches of at most `max_tokens` tokens.

    Padding counts: the tokens are N of a packed batch, B · T of a padded one. Samples keep their order within a part,
    and parts that of their first samples; `sample_index` and `group_index` keep their numbers from the whole. The other
    options are those of `pack` and `collate`; `advantages` are of all samples together.

    Raises InvalidField for a sample that alone exceeds `max_tokens`, naming it, and as `collate` does.
    """
    torch_for("collate")
    if layout not in ("padded", "packed"):
        raise InvalidField("layout", layout, "'padded' or 'packed'")
    of = chosen(batch, groups, advantages, rows=rows)
    kinds = kinds_of(of.groups, extras)
    if layout == "packed":
        packed = PackedLayout(pad_token_id, multiple_of, extras_fill, pin_memory)
        _refuse_larger(of, max_tokens, multiple_of)
        return [packed.of(of.part(part), kinds) for part in packed_parts(of.lengths, max_tokens, multiple_of)]
    padded = PaddedLayout(pad_token_id, pad_side, multiple_of, extras_fill, pin_memory)
    _refuse_larger(of, max_tokens, multiple_of)
    return [padded.of(of.part(part), kinds) for part in padded_parts(of.lengths, max_tokens, multiple_of)]


def packed_parts(lengths: Sequence[int], max_tokens: int, multiple_of: int = 1) -> Parts:
    """Cut samples into few parts of balanced lengths; returns each part's indices.

    The lengths of a part, summed and rounded up to `multiple_of`, do not exceed `max_tokens`, unless one sample alone
    does: the caller refuses such a sample.
    """

    def first_fit(bound: int) -> Parts:
        bound -= bound % multiple_of
        parts: Parts = []
        room: list[int] = []
        for i in _longest_first(lengths):
            for k, left in enumerate(room):
                if lengths[i] <= left:
                    parts[k].append(i)
                    room[k] -= lengths[i]
                    break
            else:
                parts.append([i])
                room.append(bound - lengths[i])
        return parts

    return _balanced(first_fit, max_tokens, _rounded(max(lengths, default=0), multiple_of))


def padded_parts(lengths: Sequence[int], max_tokens: int, multiple_of: int = 1) -> Parts:
    """Cut samples into parts of neighbours by length whose rectangle does not exceed `max_tokens`.

    Returns their indices.
    """

    def neighbours(bound: int) -> Parts:
        parts: Parts = []
        width = 0
        for i in _longest_first(lengths):
            if not parts or (len(parts[-1]) + 1) * width > bound:
                parts.append([])
                width = _rounded(lengths[i], multiple_of)
            parts[-1].append(i)
        return parts

    return _balanced(neighbours, max_tokens, _rounded(max(lengths, default=0), multiple_of))


def _balanced(cut: Callable[[int], Parts], most: int, least: int) -> Parts:
    """Find the parts under the smallest bound from `least` to `most` that needs no more of them than `most` does."""
    best = cut(most)
    low, high = least, most
    while high - low > high // _PRECISION:
        bound = (low + high) // 2
        parts = cut(bound)
        if len(parts) <= len(best):
            best, high = parts, bound
        else:
            low = bound + 1
    return sorted(sorted(part) for part in best)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _rounded(tokens: int, multiple_of: int) -> int:
    return -(-tokens // multiple_of) * multiple_of


def _refuse_larger(of: Chosen, max_tokens: int, multiple_of: int) -> None:
    for i, length in enumerate(of.lengths):
        if (needed := _rounded(length, multiple_of)) > max_tokens:
            raise InvalidField(
                "max_tokens",
                max_tokens,
                f"at least {needed} for sample {i} (of task {of.groups[i].task_id!r}) and its {length} tokens",
            )
