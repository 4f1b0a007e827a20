"""Releases of SGLang that the worker can drive, by the habits of the server that it relies on.

This file alone defines them: the table in docs/engines.md shows them, and a test holds the two together. The habits
were read in the wheels of 0.5.16 to 0.5.23.

Invariant: a server that lacks what is needed is refused when it is connected, before it is asked for a token or given
weights.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from rollout_workers.engine.errors import EngineUnfit

Release: TypeAlias = tuple[int, int, int]
_RELEASE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Habit:
    """Habit of a server, which it has from a release on."""

    since: Release
    what: str
    before: str
    """Behaviour of the releases before `since`."""
    needed: bool = True
    """True when the worker needs it; a server without a habit that is not needed is driven with a warning."""

    def __str__(self) -> str:
        return f"{self.what} (since {text(self.since)}; before, {self.before})"


MASKS_UNDER_DFLASH = Habit(
    (0, 5, 22),
    "sampling masks under speculative decoding of the DFlash family",
    "they were refused under all speculative decoding",
    needed=False,
)
HABITS = (
    Habit((0, 5, 19), "`weight_versions` in answers", "nothing told which weights made a token"),
    Habit((0, 5, 20), "`/ready`", "only what generates a token told whether a server was ready"),
    Habit(
        (0, 5, 21),
        "`/begin_weight_update` and `/end_weight_update`",
        "tensors and broadcasts were taken in another way",
    ),
    Habit((0, 5, 21), "a cache flush while paused requests wait", "it failed, and that ended the scheduler"),
    Habit((0, 5, 22), "a failed cache flush as an answer", "it ended the scheduler", needed=False),
    MASKS_UNDER_DFLASH,
)
LEAST = max(habit.since for habit in HABITS if habit.needed)
OPTION = "--sglang-version"


def text(release: Release) -> str:
    """Release number as SGLang writes it."""
    return ".".join(map(str, release))


def lacks(release: Release) -> list[Habit]:
    """Habits that a server of this release lacks."""
    return [habit for habit in HABITS if habit.since > release]


def check(said: object, engine: str, *, counts_as: str = "") -> tuple[Release, list[str]]:
    """The release of a server that says this of its version, and what there is to be warned of.

    `counts_as`: the release that it is taken for, whatever it says. Development versions and later builds of a release
    count as that release. Raises EngineUnfit.
    """
    release = release_of(counts_as or said)
    if release is None:
        why = f"its version {str(said)[:100]!r} names no release of SGLang, of which {text(LEAST)} is the least"
        raise EngineUnfit(engine, f"{why}; a fork or a build without tags: {OPTION} says which release it is like")
    missing = lacks(release)
    notices = [f"taken for SGLang {counts_as} by {OPTION}; it says {said}"] if counts_as else []
    if needed := [habit for habit in missing if habit.needed]:
        why = f"SGLang {said}, and {text(LEAST)} is the least that can be driven. Missing: "
        raise EngineUnfit(engine, why + "; ".join(map(str, needed)))
    if missing:
        notices.append(f"SGLang {counts_as or said} lacks: {'; '.join(map(str, missing))}")
    return release, notices


def release_of(said: object) -> Release | None:
    """The release in a version; None where it names none, as 0.0.0 of a build without tags."""
    found = _RELEASE.match(str(said or ""))
    if found is None:
        return None
    release = (int(found[1]), int(found[2]), int(found[3]))
    return release if any(release) else None
