"""Tables of docs/reliability.md, and the newest counts in README, from the results of chaos runs that are kept.

usage: python -m tests.chaos.pages
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tables import put, table
from tests.chaos.report import table as recovery_table

RESULTS = Path(__file__).parents[2] / "bench/results"
PLANTED = RESULTS / "chaos_planted.json"
COUNTS = (
    *("bouts", "bouts_of_real_engines", "bouts_from_the_last_release", "kills", "other_faults", "groups_acknowledged"),
    *("resumes", "violations"),
)


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


def kept() -> list[dict[str, Any]]:
    """Reports of the runs that are kept, the newest one last."""
    made = [json.loads(file.read_text()) for file in RESULTS.glob("chaos_run_*.json")]
    return sorted(made, key=lambda each: str(each["began"]))


def runs(made: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of the table of runs, and the times without progress of the newest one."""
    if not made:
        return ["No run is kept."]
    facts = ("commit", "minutes", "seed")
    rows = [
        (each["began"][:10], *(each[name] for name in facts), *(each["counts"][name] for name in COUNTS))
        for each in made
    ]
    head = ("date", *facts, *(name.replace("_", " ") for name in COUNTS))
    return [*table(head, rows), "", f"Times without progress of seed {made[-1]['seed']}:", "", recovery_table(made[-1])]


def newest(run: dict[str, Any]) -> list[str]:
    """A sentence with the counts of a run, and what is to be said of its violations."""
    counts = run["counts"]
    when = f"{run['minutes']:g} minutes of `make test-chaos` ({run['began'][:10]}, seed {run['seed']})"
    faults = f"{counts['kills']} kills and {counts['other_faults']} other faults"
    groups = f"{counts['groups_acknowledged']:,} groups acknowledged"
    violations = f"{counts['violations'] or 'no'} violation{'' if counts['violations'] == 1 else 's'}"
    return [f"The newest {when}:", f"{faults}, {groups}, {violations}.", *([run["note"]] if "note" in run else [])]


if __name__ == "__main__":
    put("chaos-planted", planted())
    put("chaos-runs", runs(kept()))
    for last in kept()[-1:]:
        put("chaos-newest", newest(last))
