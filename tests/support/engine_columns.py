"""Columns of a generated sample by their kind."""

from typing import Any

from rollout_workers.engine.token_rows import PositionRows, TokenRows, TokenValues
from rollout_workers.engine.types import GeneratedSample


def mask_of(sample: GeneratedSample) -> TokenRows:
    """The sampling mask."""
    column = sample.columns["sampling_mask"]
    assert isinstance(column, TokenRows)
    return column


def rows_of(sample: GeneratedSample) -> PositionRows:
    """The routed experts."""
    column = sample.columns["routed_experts"]
    assert isinstance(column, PositionRows)
    return column


def values_of(sample: GeneratedSample, asked: str, name: str) -> Any:
    """A column with one value for each token, of what was asked for."""
    column = sample.columns[asked]
    assert isinstance(column, TokenValues)
    return column.arrays[name]
