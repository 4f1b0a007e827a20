"""Journal of a trainer that was killed again and again, held against what it was promised."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def broken_in(path: Path, max_staleness: int) -> list[str]:
    """Promises that the journal breaks; see the functions."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    steps = [line["trained"] for line in lines if "trained" in line]
    ends = [line["end"] for line in lines if "end" in line]
    found = [*_trained_once(steps), *_fresh(steps, max_staleness), *_ended(steps, ends)]
    return [f"journal: {problem}" for problem in found[:3]]


def _trained_once(steps: list[dict[str, Any]]) -> Iterator[str]:
    """A step that comes again is what it was, and no group is in two."""
    groups_of: dict[int, dict[str, str]] = {}
    step_of: dict[str, int] = {}
    for step in steps:
        number, groups = step["step"], step["groups"]
        if groups_of.setdefault(number, groups) != groups:
            yield f"step {number} came again with other groups"
        for group_id in groups:
            if step_of.setdefault(group_id, number) != number:
                yield f"group {group_id} is in the steps {step_of[group_id]} and {number}"
    if sorted(groups_of) != list(range(len(groups_of))):
        yield f"of {len(groups_of)} steps some are missing: {sorted(groups_of)}"


def _fresh(steps: list[dict[str, Any]], max_staleness: int) -> Iterator[str]:
    """No token is of weights that are too old, or that were not published yet."""
    for step in steps:
        newest, oldest = max(step["versions"]), min(step["versions"])
        if newest > step["train_version"]:
            yield f"step {step['step']} for version {step['train_version']} has tokens of {newest}"
        if step["train_version"] - oldest > max_staleness or step["staleness_max"] > max_staleness:
            yield f"step {step['step']} for version {step['train_version']} has tokens of {oldest}"


def _ended(steps: list[dict[str, Any]], ends: list[dict[str, Any]]) -> Iterator[str]:
    """The ledger has in the end what was trained, and nothing was lost or has failed."""
    if not ends:
        yield "the session did not end in order"
        return
    end = ends[-1]
    trained = len({group_id for step in steps if step["step"] < end["committed_steps"] for group_id in step["groups"]})
    if not end["balanced"] or end["trained"] != trained or end["lost"] or end["failed"]:
        yield f"{trained} groups were trained, the ledger says {end}"
