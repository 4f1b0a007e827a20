"""Tables of docs/reliability.md, from the results of chaos runs that are kept.

usage: python -m tests.chaos.pages
"""

import json
from pathlib import Path

from bench.tables import put, table
from tests.chaos.report import table as recovery_table

RESULTS = Path(__file__).parents[2] / "bench/results"
PLANTED = RESULTS / "chaos_planted.json"
COUNTS = ("bouts", "kills", "other_faults", "groups_acknowledged", "resumes", "violations")


def planted() -> list[str]:
    """Lines of the table of planted defects."""
    made = json.loads(PLANTED.read_text())
    found = sum(each["found"] for each in made["defects"])
    rows = [
        (
            each["defect"],
            each["by"].partition(":")[0] if each["found"] else "not found",
            each["bouts"],
            each["seconds"],
        )
        for each in made["defects"]
    ]
    return [
        *table(("defect", "found by", "bouts", "s"), rows),
        "",
        f"{made['date']}: {found} of {len(rows)}; {made['note']}",
    ]


def runs() -> list[str]:
    """Lines of the table of runs, and the times without progress of the longest one."""
    made = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("chaos_run_*.json"))]
    if not made:
        return ["No run is kept."]
    rows = [
        (each["began"][:10], each["minutes"], each["seed"], *(each["counts"][name] for name in COUNTS)) for each in made
    ]
    head = ("date", "minutes", "seed", *(name.replace("_", " ") for name in COUNTS))
    longest = max(made, key=lambda each: float(each["minutes"]))
    return [*table(head, rows), "", f"Times without progress of seed {longest['seed']}:", "", recovery_table(longest)]


if __name__ == "__main__":
    put("chaos-planted", planted())
    put("chaos-runs", runs())
