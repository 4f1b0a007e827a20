"""Cells of the comparison (policy × loss × seed), their order, and the file of their results, a row a line.

Invariant: rows of one file have one setting, and no cell has two rows; so what is left is what has no row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.tables import write_rows
from trainer_client.policy import Policy

GROUPS, GROUP_SIZE = 32, 8
"""Groups of a batch, and samples of a group."""
MICRO_BATCH_GROUPS = 8
Row = Mapping[str, Any]
"""Result of a cell as JSON values."""


def _bounded(versions: int) -> Policy:
    """Everything exactly `versions` old where engines are fast enough: as much is admitted, and nothing is dropped."""
    return Policy(preset=f"areal({versions})", max_inflight_groups=0, stale_action="wait", batch_groups=GROUPS)


_STREAMED = Policy(preset=f"streaming({MICRO_BATCH_GROUPS})", batch_groups=GROUPS)
SYNCHRONOUS = "synchronous"
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        SYNCHRONOUS: Policy(preset="sync", batch_groups=GROUPS),
        "one step off": Policy(preset="one_step_off", batch_groups=GROUPS),
        "η 2": _bounded(2),
        "η 4": _bounded(4),
        "η 8": _bounded(8),
        "streamed": _STREAMED,
        "streamed, no fresh start": replace(_STREAMED, fresh_start_ms=0),
        "controller, target 2": replace(_bounded(8), target_staleness_milli=2_000),
    }
)
LOSSES = ("AIPO", "plain GRPO", "decoupled PPO", "TIS")
"""Losses in the order in which they are run: first those that differ most."""
SEEDS = (1, 2, 3)


class Cell(NamedTuple):
    """One run of the loop."""

    policy: str
    loss: str
    seed: int

    def __str__(self) -> str:
        return f"{self.policy}, {self.loss}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Results:
    """File of results: a setting, which all rows share, and the rows."""

    path: Path
    setting: Mapping[str, Any]

    def rows(self) -> list[Row]:
        """Rows so far. Raises ValueError where they come from another setting."""
        if not self.path.exists():
            return []
        written = json.loads(self.path.read_text())
        if written["setting"] != dict(self.setting):
            raise ValueError(f"{self.path} has results of another setting, {written['setting']}: move it away first")
        rows: list[Row] = written["rows"]
        return rows

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of the cells that have no row, in their order."""
        done = {cell_of(row) for row in self.rows()}
        return [cell for cell in cells if cell not in done]

    def add(self, row: Row) -> None:
        """Write one more row. Raises ValueError where its cell has one."""
        rows = self.rows()
        if cell_of(row) in {cell_of(other) for other in rows}:
            raise ValueError(f"there is a result of {cell_of(row)} already")
        aside = self.path.with_suffix(".tmp")
        write_rows(aside, {"setting": dict(self.setting), "rows": sorted([*rows, row], key=_place)})
        aside.replace(self.path)


def cell_of(row: Row) -> Cell:
    """The cell that a row is of."""
    return Cell(row["policy"], row["loss"], row["seed"])


def cells(
    policies: Sequence[str] = tuple(POLICIES), losses: Sequence[str] = LOSSES, seeds: Sequence[int] = SEEDS
) -> list[Cell]:
    """Cells in the order in which they are run: all of a seed before any of the next, so that a part is balanced."""
    return [Cell(policy, loss, seed) for seed in seeds for loss in losses for policy in policies]


def _place(row: Row) -> tuple[int, ...]:
    """Place of a row in the file, whenever it was made."""
    policy, loss, seed = cell_of(row)
    return seed, LOSSES.index(loss), list(POLICIES).index(policy)
