"""The figures of the matrix: one row for each cell, in the file that RB_ENGINE_RESULTS names.

python -m tests.engine_matrix.results FILE      prints the table
"""

import json
import os
import statistics
from pathlib import Path
from typing import Any

from tests.engine_matrix.cell import Outcome


def note(outcome: Outcome, *, overlap: bool) -> None:
    """Add a row, in place of an earlier one of the same cell; print it with pytest -s."""
    row = _row(outcome, overlap=overlap)
    print(f"\n{row}")
    if not (name := os.environ.get("RB_ENGINE_RESULTS")):
        return
    file = Path(name)
    rows = [r for r in _rows(file) if _key(r) != _key(row)]
    rows.append(row)
    file.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []
    return rows


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["overlap"], row["mode"], row["kind"]


def _row(outcome: Outcome, *, overlap: bool) -> dict[str, Any]:
    seen = outcome.seen
    return {
        "overlap": overlap,
        "mode": outcome.cell.mode,
        "kind": outcome.cell.kind,
        "updates": outcome.cell.updates,
        "groups": seen.groups,
        "tokens": seen.tokens,
        "samples": seen.samples,
        "spanning_samples": seen.spanning_samples,
        "mislabelled": seen.mislabelled,
        "reload_ms_median": round(statistics.median(outcome.reload_ms)),
        "reload_ms_p95": _p95(outcome.reload_ms),
        "update_ms_median": round(1000 * statistics.median(outcome.update_s)),
        "update_ms_p95": _p95([round(1000 * each) for each in outcome.update_s]),
        "tokens_returned": sum(words["tokens_returned"] for words in outcome.words),
        "tokens_discarded": sum(sum(words["tokens_discarded"].values()) for words in outcome.words),
        "wall_s": round(outcome.wall_s, 1),
    }


def _p95(values: list[int]) -> int:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
