"""The tables of docs from the results of the tests on real engines.

python -m tests.engine_matrix.tables MATRIX.json RECOVERY.json
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.tables import put, table

Rows = list[dict[str, Any]]


def matrix(rows: Rows) -> list[str]:
    """One line for each cell."""
    head = (
        "mode, kind", "updates", "groups", "tokens", "samples over an update", "tokens mislabelled",
        "reload ms, median", "p95", "update ms, median", "p95", "tokens handed back", "discarded",
    )  # fmt: skip
    columns = (
        "updates", "groups", "tokens", "spanning_samples", "mislabelled", "reload_ms_median", "reload_ms_p95",
        "update_ms_median", "update_ms_p95", "tokens_returned", "tokens_discarded",
    )  # fmt: skip
    return table(
        head,
        [
            (f"{row['mode']}, {row['kind']}{', overlap' if row['overlap'] else ''}", *(row[name] for name in columns))
            for row in rows
        ],
    )


def recovery(rows: Rows) -> list[str]:
    """One line for each thing that was killed; of several kills the median and the slowest."""
    killed = dict.fromkeys(row["killed"] for row in rows)

    def seconds(name: str, field: str) -> str:
        values = [row[field] for row in rows if row["killed"] == name]
        return f"{statistics.median(values):.1f}" + (f", at most {max(values):.1f}" if len(values) > 1 else "")

    head = ("kill -9 of", "next group accepted after s", "all engines at the newest version after s")
    return table(head, [(name, seconds(name, "next_group_s"), seconds(name, "newest_s")) for name in killed])


def main(matrix_file: Path, recovery_file: Path) -> None:
    """Print the tables, and put them into the pages that have a place for them."""
    for name, lines in (
        ("test-engine-full", matrix(json.loads(matrix_file.read_text())["rows"])),
        ("recovery", recovery(json.loads(recovery_file.read_text())["rows"])),
    ):
        print("\n".join(lines))
        print(f"in {put(name, lines)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
