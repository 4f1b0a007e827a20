"""Columns that a task asks of the engine, between samples and messages.

Ragged ones are two columns on the wire: `NAME`, with the rows of a sample's tokens one after another, and
`NAME_counts`, int32 per token: how many of them are each token's. Tokens of the prompt and of an environment have none.
Values by token are 0 there.

Routed experts are a column by token in a group: the last token, never an input, repeats the row before it. In a partial
rollout they are ragged, as many as there are.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from buffer_wire import layout
from buffer_wire.engine_columns import ROUTED_EXPERTS, counts_of, names_of
from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.token_rows import EngineColumn, PositionRows, TokenRows, TokenValues

Made = list[tuple[groups_pb2.Column, layout.Rows]]


def columns_of(
    name: str, columns: Sequence[EngineColumn], prompts: Sequence[int], tokens: Sequence[int], *, partial: bool
) -> Made:
    """Header entries and rows of what was asked for as `name`, of samples with so many tokens of prompt and in all."""
    first = columns[0]
    if isinstance(first, TokenRows):
        return _ragged(name, columns, prompts)  # type: ignore[arg-type] # all are of one kind
    if isinstance(first, TokenValues):
        return [pair for part in names_of(name) for pair in _by_token(part, columns, prompts)]  # type: ignore[arg-type]
    return _by_position(name, columns, tokens, partial=partial)  # type: ignore[arg-type]


def _ragged(name: str, rows: Sequence[TokenRows], prompts: Sequence[int]) -> Made:
    values = [each.values for each in rows]
    none = np.zeros(max(prompts, default=0), np.int32)
    counts = [part for each, prompt in zip(rows, prompts, strict=True) for part in (none[:prompt], each.counts)]
    ragged = layout.column_of(name, values[0], groups_pb2.AXIS_RAGGED, [len(each) for each in values])
    return [(ragged, values), (layout.column_of(counts_of(name), none, groups_pb2.AXIS_TOKEN), counts)]


def _by_token(name: str, columns: Sequence[TokenValues], prompts: Sequence[int]) -> Made:
    arrays = [each.arrays[name] for each in columns]
    none = np.zeros((max(prompts, default=0), *arrays[0].shape[1:]), arrays[0].dtype)
    parts = [part for array, prompt in zip(arrays, prompts, strict=True) for part in (none[:prompt], array)]
    return [(layout.column_of(name, none, groups_pb2.AXIS_TOKEN), parts)]


def _by_position(name: str, columns: Sequence[PositionRows], tokens: Sequence[int], *, partial: bool) -> Made:
    known = next((each.rows for each in columns if len(each.rows)), None)
    if known is None:
        return []
    rows = [each.rows if len(each.rows) else known[:0] for each in columns]
    if partial:
        entry = layout.column_of(name, known, groups_pb2.AXIS_RAGGED, [len(each) for each in rows])
        return [(entry, rows)]
    # The rows are megabytes, and stay where they are: what is behind them is a part of its own.
    parts = [
        part
        for each, length in zip(rows, tokens, strict=True)
        for part in (each, np.repeat(each[-1:], length - len(each), axis=0))
    ]
    return [(layout.column_of(name, known, groups_pb2.AXIS_TOKEN), parts)]


def of_partial(asked: str, header: groups_pb2.GroupHeader, columns: Mapping[str, layout.Array]) -> list[EngineColumn]:
    """Each sample's column, of a partial rollout. Raises ValueError where it is not all there."""
    names, samples = names_of(asked), header.samples
    if asked == ROUTED_EXPERTS:
        return list(_positions(asked, header, columns))
    if not set(names) <= columns.keys():
        raise ValueError(f"it lacks the column {asked}, which the task asks for")
    if counts_of(asked) in names:
        return list(_token_rows(asked, columns, samples))
    found: list[EngineColumn] = []
    token = 0
    for sample in samples:
        response = slice(token + sample.prompt_len, token + sample.tokens)
        found.append(TokenValues({name: columns[name][response] for name in names}))
        token += sample.tokens
    return found


def _positions(
    name: str, header: groups_pb2.GroupHeader, columns: Mapping[str, layout.Array]
) -> Iterable[PositionRows]:
    at = 0
    entry = next((column for column in header.columns if column.name == name), None)
    rows = [0] * len(header.samples) if entry is None else layout.column_rows(header, entry)
    for sample, count in zip(header.samples, rows, strict=True):
        whole = sample.finish_reason != groups_pb2.FINISH_REASON_ABORTED
        if count >= sample.tokens or (whole and not count):
            raise ValueError(f"a sample of {sample.tokens} tokens has {count} rows of {name}")
        none = np.empty((0, 0, 0), np.uint8)
        yield PositionRows(0, columns[name][at : at + count] if count else none)
        at += count


def _token_rows(
    name: str, columns: Mapping[str, layout.Array], samples: Iterable[groups_pb2.Sample]
) -> Iterable[TokenRows]:
    values, counts = (columns[which].astype(np.int32) for which in (name, counts_of(name)))
    if values.ndim != 1 or counts.ndim != 1:
        raise ValueError(f"rows of its {name} are not scalars")
    at, token = 0, 0
    for sample in samples:
        own = counts[token + sample.prompt_len : token + sample.tokens]
        end = at + int(own.sum())
        yield TokenRows(values[at:end], own)
        at, token = end, token + sample.tokens
    if (counts < 0).any() or at != len(values):
        raise ValueError(f"its {name} has {len(values)} rows, and {at} by the counts of its responses")
