"""Columns that a task asks of the engine: their names in `Task.columns`, and the columns of the group that they become.

| asked for | becomes, of each token |
|---|---|
| `sampling_mask` | `sampling_mask`, ragged int32: ids that could be drawn; `sampling_mask_counts`, int32: how many |
| `top_logprobs_K` | `top_logprobs` float32 [K], `top_ids` int32 [K]: the likeliest tokens, before it is narrowed |
| `entropy` | `entropy`, float32: of the distribution that was drawn from, in nats |
| `routed_experts` | `routed_experts`, uint8 or int16 [layers, k]: where the token went as an input |
"""

import re

SAMPLING_MASK = "sampling_mask"
TOP_LOGPROBS = "top_logprobs"
TOP_IDS = "top_ids"
ENTROPY = "entropy"
ROUTED_EXPERTS = "routed_experts"

MAX_TOP = 1_024
"""Largest K of `top_logprobs_K`."""

KNOWN = f"{SAMPLING_MASK}, {ENTROPY}, {ROUTED_EXPERTS} or {TOP_LOGPROBS}_K, K from 1 to {MAX_TOP:,}"
"""Names that can be asked for, in words."""

_TOP = re.compile(rf"{TOP_LOGPROBS}_([1-9][0-9]{{0,3}})")


def counts_of(name: str) -> str:
    """The column beside a ragged one: the number of its rows that belong to each token."""
    return f"{name}_counts"


def top_of(name: str) -> int:
    """K of `top_logprobs_K`; 0 for another name."""
    found = _TOP.fullmatch(name)
    return top if found and (top := int(found[1])) <= MAX_TOP else 0


def names_of(asked: str) -> tuple[str, ...]:
    """The columns that a name in `Task.columns` becomes; none if nothing of that name can be asked for."""
    if top_of(asked):
        return TOP_LOGPROBS, TOP_IDS
    if asked == SAMPLING_MASK:
        return SAMPLING_MASK, counts_of(SAMPLING_MASK)
    return (asked,) if asked in (ENTROPY, ROUTED_EXPERTS) else ()


ALL = frozenset({SAMPLING_MASK, counts_of(SAMPLING_MASK), TOP_LOGPROBS, TOP_IDS, ENTROPY, ROUTED_EXPERTS})
"""Names of the columns that engines make."""
