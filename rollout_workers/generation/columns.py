"""Columns that a task asks of the engine, between samples and messages.

On the wire each is two columns: `NAME`, ragged, with the rows of a sample's tokens one after another, and
`NAME_counts`, int32 per token: how many of them are each token's. Tokens of the prompt and of an environment have none.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from buffer_wire import layout
from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.token_rows import TokenRows


def columns_of(
    name: str, rows: Sequence[TokenRows], prompts: Sequence[int]
) -> list[tuple[groups_pb2.Column, layout.Rows]]:
    """Header entries and rows of one column: those of each sample's response, behind so many prompt tokens."""
    values = [each.values for each in rows]
    none = np.zeros(max(prompts, default=0), np.int32)
    counts = [part for each, tokens in zip(rows, prompts, strict=True) for part in (none[:tokens], each.counts)]
    ragged = layout.column_of(name, values[0], groups_pb2.AXIS_RAGGED, [len(each) for each in values])
    return [(ragged, values), (layout.column_of(layout.counts_of(name), none, groups_pb2.AXIS_TOKEN), counts)]


def rows_of(name: str, columns: Mapping[str, layout.Array], samples: Iterable[groups_pb2.Sample]) -> list[TokenRows]:
    """The rows of each sample's response in a payload's columns. Raises ValueError where they are not all there."""
    if not {name, layout.counts_of(name)} <= columns.keys():
        raise ValueError(f"it lacks the column {name}, which the task asks for")
    values, counts = (columns[which].astype(np.int32) for which in (name, layout.counts_of(name)))
    if values.ndim != 1 or counts.ndim != 1:
        raise ValueError(f"rows of its {name} are not scalars")
    found, at, token = [], 0, 0
    for sample in samples:
        own = counts[token + sample.prompt_len : token + sample.tokens]
        end = at + int(own.sum())
        found.append(TokenRows(values[at:end], own))
        at, token = end, token + sample.tokens
    if (counts < 0).any() or at != len(values):
        raise ValueError(f"its {name} has {len(values)} rows, and {at} by the counts of its responses")
    return found
