"""Journal of a trainer that was killed again and again, held against what it was promised.

A step's groups are by id {digest, steps that have trained on it before, oldest and newest version of its tokens}. An
evaluation's are by task {digest, oldest and newest version}, as it was read once and once more.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Bounds of the run's policy: staleness of new groups, of groups that are used again, and uses of each."""

    max_staleness: int
    reuse_max_staleness: int
    max_uses: int


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def counted(path: Path) -> dict[str, int]:
    """Numbers of the steps and of the evaluations in a journal; a bout may have ended before there was one."""
    lines = _lines(path) if path.exists() else []
    return {
        "session_steps": sum("trained" in line for line in lines),
        "evaluations": sum("evaluated" in line for line in lines),
        "evaluations_left": sum("evaluation_left" in line for line in lines),
    }


def broken_in(path: Path, bounds: Bounds) -> list[str]:
    """Promises that the journal breaks; see the functions."""
    lines = _lines(path)
    steps = [line["trained"] for line in lines if "trained" in line]
    ends = [line["end"] for line in lines if "end" in line]
    evaluated = [line["evaluated"] for line in lines if "evaluated" in line]
    found = [*_trained_once(steps, bounds), *_fresh(steps, bounds), *_evaluated(evaluated), *_ended(steps, ends)]
    return [f"journal: {problem}" for problem in found[:3]]


def _trained_once(steps: list[dict[str, Any]], bounds: Bounds) -> Iterator[str]:
    """A step that comes again is what it was. A group is new in one step, and used again in later ones, counted."""
    groups_of: dict[int, dict[str, list[Any]]] = {}
    for step in steps:
        if groups_of.setdefault(step["step"], step["groups"]) != step["groups"]:
            yield f"step {step['step']} came again with other groups"
    if sorted(groups_of) != list(range(len(groups_of))):
        yield f"of {len(groups_of)} steps some are missing: {sorted(groups_of)}"
    uses: dict[str, list[int]] = defaultdict(list)
    bytes_of: dict[str, str] = {}
    for number in sorted(groups_of):
        for group_id, (digest, prior, _, _) in groups_of[number].items():
            uses[group_id].append(prior)
            if bytes_of.setdefault(group_id, digest) != digest:
                yield f"group {group_id} came with other bytes in step {number}"
    for group_id, priors in uses.items():
        if priors != list(range(len(priors))) or len(priors) > bounds.max_uses:
            yield f"group {group_id} was trained on as one of {priors} uses"


def _fresh(steps: list[dict[str, Any]], bounds: Bounds) -> Iterator[str]:
    """No token is of weights that are too old, or that were not published yet."""
    for step in steps:
        for group_id, (_, prior, oldest, newest) in step["groups"].items():
            bound = bounds.reuse_max_staleness if prior else bounds.max_staleness
            if newest > step["train_version"] or step["train_version"] - oldest > bound:
                yield f"step {step['step']} for version {step['train_version']} has {group_id} of {oldest} to {newest}"
        if step["mislabelled"]:
            yield f"step {step['step']} has {step['mislabelled']} tokens that older weights made than they say"


def _evaluated(evaluated: list[dict[str, Any]]) -> Iterator[str]:
    """An evaluation has one result of each task, wholly of its version, and has the same when it is read again."""
    for each in evaluated:
        first, again = each["read"]
        if first != again:
            yield f"evaluation {each['id']} was read as {first}, then as {again}"
        tasks = {name.partition("#")[0] for name in first}
        if len(tasks) != len(first) or len(tasks) + each["failures"] != each["tasks"]:
            yield f"evaluation {each['id']} of {each['tasks']} tasks has {sorted(first)}, {each['failures']} failures"
        if any([oldest, newest] != [each["version"]] * 2 for _, oldest, newest in first.values()):
            yield f"evaluation {each['id']} of version {each['version']} has {first}"


def _ended(steps: list[dict[str, Any]], ends: list[dict[str, Any]]) -> Iterator[str]:
    """The ledger has in the end what was trained, and nothing was lost or has failed."""
    if not ends:
        yield "the session did not end in order"
        return
    end = ends[-1]
    trained = len({group_id for step in steps if step["step"] < end["committed_steps"] for group_id in step["groups"]})
    if not end["balanced"] or end["trained"] != trained or end["lost"] or end["failed"]:
        yield f"{trained} groups were trained, the ledger says {end}"
