"""Loads the Lua scripts: resolves `-- @include name`, renders tables and numbers, leaves out what no part of one uses.

Invariants: each include is pasted once, before its first use. The tables in the scripts are those of
rules/transitions.py, the places of totals those of rules/totals.py. The bounds are those of domain/policy.py,
domain/evaluations.py and domain/ops/groups.py. `$SCHEMA_VERSION` in a script is that of keys.py. `python -m
buffer_service.store.scripts --expand OUTDIR` writes the expanded scripts for a linter.
"""

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import wrap

from buffer_service.domain.evaluations import FAILURES_SHOWN, MAX_ATTEMPTS, MAX_EVALUATIONS, MAX_STORED_BYTES
from buffer_service.domain.ops import groups
from buffer_service.domain.policy import MAX_ENVIRONMENTS, RunPolicy
from buffer_service.rules.filters import FILTERS, Filter
from buffer_service.rules.groups import AMOUNT, GATHERED, PUSHED, RECORD
from buffer_service.rules.statistics import STATISTICS
from buffer_service.rules.totals import (
    ACCEPTED,
    ENGINES,
    GENERATION,
    OF_ENVIRONMENT,
    STALENESS_BOUNDS,
    TOTALS,
    TRAINER,
    WINDOW_VERSIONS,
)
from buffer_service.rules.transitions import GROUP_TRANSITIONS, TASK_TRANSITIONS, GroupState, TaskState
from buffer_service.store.keys import SCHEMA_VERSION
from buffer_wire.payloads import keys

LUA = Path(__file__).parent / "lua"

_NAME = re.compile(r"\b(?:[A-Z][a-z]\w*\.)?\w+")
"""A word, that of a library's field with the library's name before it."""

_COMMENT = re.compile(r"--.*")
_DEFINITION = re.compile(
    r"""
    (?:^--.*\n)*                                   # what is said of it
    ^(?:function|local)\ (?P<name>[A-Z][\w.]*)(?:
      \(.*\n(?:(?!end$).*\n)*end                  # a library's function
    | \ =\ \{\}                                   # a library's table
    | \ =\ \{\n(?:\ \ .*\n)*\}                    # a rendered table
    | \ =\ '.*'(?:\n\ \ .*)*                      # rendered words
    )\n
    """,
    re.MULTILINE | re.VERBOSE,
)

_INCLUDE = re.compile(r"^-- @include (?P<name>[a-z_]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """An operation's script as the store runs it; `sha` is its SHA-1, the name that EVALSHA knows it by."""

    name: str
    source: str
    sha: str


def render_transitions(name: str, transitions: Mapping[str, frozenset[str]]) -> str:
    """A transition table as a Lua local: a string of words "from>to", since a script builds its tables at each call."""
    ways = [f"{state}>{target}" for state, following in transitions.items() for target in sorted(map(str, following))]
    lines = [f"  .. '{' '.join(ways[first : first + 3])} '" for first in range(0, len(ways), 3)]
    return "\n".join([f"local {name} = ' '", *lines])


def render_states(name: str, states: Iterable[str]) -> str:
    """Names of states as a Lua local: words in one string, some to a line."""
    lines = wrap(" ".join(map(str, states)), 90, break_on_hyphens=False)
    return f"local {name} = " + " ..\n  ' ' .. ".join(f"'{line}'" for line in lines)


def render_places(name: str, names: Iterable[str]) -> str:
    """Places of names in an array, as a Lua local: a table of places from 1."""
    return _table(name, [f"{one} = {place}" for place, one in enumerate(names, 1)])


def _table(name: str, entries: Iterable[str]) -> str:
    return "\n".join([f"local {name} = {{", *(f"  {entry}," for entry in entries), "}"])


def render_defaults(name: str, policy: Mapping[str, object]) -> str:
    """A policy as RunPolicy.to_store gives it as a Lua local; lists have to be empty."""
    literals = {field: "{}" if isinstance(value, list) else repr(value) for field, value in policy.items()}
    return _table(name, [f"{field} = {literal}" for field, literal in literals.items()])


def render_filters(filters: Iterable[Filter]) -> str:
    """The filters as a Lua library: whether a policy has any, and the statistic under which one ends a group.

    Of all that are set, or of those that judge `rewards`, or the others (`lengths`) alone.
    """
    filters = list(filters)
    are_set = [f"policy.{each.field} ~= {each.off}" for each in filters]
    chain = [
        f"  if of ~= '{'lengths' if each.judges_rewards else 'rewards'}' and {is_set}\n"
        f"    and group[P_{each.fact.upper()}] {each.comparison} policy.{each.field} then\n"
        f"    return '{each.statistic}'\n"
        "  end"
        for each, is_set in zip(filters, are_set, strict=True)
    ]
    return "\n".join(
        [
            "local Filters = {}\n",
            "function Filters.are_set(policy)",
            "  return " + "\n    or ".join(are_set),
            "end\n",
            "function Filters.ended_by(policy, group, of)",
            *chain,
            "  return nil",
            "end\n",
        ]
    )


def constants() -> dict[str, int]:
    """Numbers that scripts name: bounds, and places from 1 in a record (G_), a pushed group (P_), an amount (A_)
    and what is gathered (GATHERED_).
    """
    return {
        "MAX_ENVIRONMENTS": MAX_ENVIRONMENTS,
        "MAX_EVALUATIONS": MAX_EVALUATIONS,
        "MAX_EVAL_BYTES": MAX_STORED_BYTES,
        "MAX_EVAL_ATTEMPTS": MAX_ATTEMPTS,
        "EVAL_FAILURES_SHOWN": FAILURES_SHOWN,
        "EVICTED_AT_ONCE": groups.PORTION,
        "TAKEN_AT_ONCE": groups.TAKEN_AT_ONCE,
        "REMEMBERED_TASKS": groups.REMEMBERED_TASKS,
        "UNPUSHED_MS": groups.UNPUSHED_MS,
        "PART_BYTES": keys.PART_BYTES,
        "WINDOW_VERSIONS": WINDOW_VERSIONS,
        **{f"G_{name.upper()}": place for place, name in enumerate(RECORD, 1)},
        **{f"P_{name.upper()}": place for place, name in enumerate(PUSHED, 1)},
        **{f"A_{name.upper()}": place for place, name in enumerate(AMOUNT, 1)},
        **{f"GATHERED_{name.upper()}": place for place, name in enumerate(GATHERED, 1)},
    }


def _virtual() -> dict[str, str]:
    tables = [
        render_transitions("GROUP_TRANSITIONS", GROUP_TRANSITIONS),
        render_transitions("TASK_TRANSITIONS", TASK_TRANSITIONS),
    ]
    states = [render_states("GROUP_STATES", GroupState), render_states("TASK_STATES", TaskState)]
    origin = "-- Rendered from rules/transitions.py.\n\n"
    places = (
        "-- From rules/totals.py.\n\n"
        f"{render_places('TOTAL_PLACES', TOTALS)}\n"
        f"{_table('ENVIRONMENT_TOTALS', map(repr, OF_ENVIRONMENT))}\n"
        f"{_table('STALENESS_BOUNDS', map(str, STALENESS_BOUNDS))}\n"
    )
    defaults = f"-- From domain/policy.py.\n\n{render_defaults('POLICY_DEFAULTS', RunPolicy().to_store())}\n"
    lists = {"accepted": (*ACCEPTED, *GENERATION), "engines": ENGINES, "trainer": TRAINER}
    words = {name: ",\n    ".join(map(repr, names)) for name, names in lists.items()}
    totals_of = _table("TOTALS_OF", [f"{name} = {{\n    {names}}}" for name, names in words.items()])
    statistics = _table("STATISTICS", [f"{name} = {each.begins}" for name, each in STATISTICS.items()])
    return {
        "filters": f"-- Rendered from rules/filters.py.\n\n{render_filters(FILTERS)}",
        "policy_defaults": defaults,
        "statistics": f"-- Rendered from rules/statistics.py.\n\n{statistics}\n",
        "total_places": places,
        "totals_of": f"-- From rules/totals.py.\n\n{totals_of}\n",
        "transitions": origin + "\n\n".join(tables) + "\n",
        "states": origin + "\n".join(states) + "\n",
    }


def expand(source: str, libraries: Mapping[str, str]) -> str:
    """`source` with its includes pasted in, each once, depth first. Raises KeyError for an unknown one."""
    pasted: set[str] = set()

    def paste(match: re.Match[str]) -> str:
        name = match["name"]
        if name in pasted:
            return ""
        pasted.add(name)
        return _INCLUDE.sub(paste, libraries[name])

    return _INCLUDE.sub(paste, source)


def render(source: str, **more: int) -> str:
    """`source` with the numbers of `constants`, and `more`, in the places of their names."""
    numbers = constants() | more
    return re.sub(rf"\b(?:{'|'.join(numbers)})\b", lambda name: str(numbers[name[0]]), source)


def _mentions(source: str) -> Counter[str]:
    names = Counter(_NAME.findall(_COMMENT.sub("", source)))
    for name, count in [*names.items()]:
        if "." in name:
            names[name.partition(".")[0]] += count
    return names


def prune(source: str) -> str:
    """`source` without the definitions that nothing in it mentions: a script makes what it defines at each call."""
    mentions = _mentions(source)
    left = {block: _mentions(block[0]) for block in _DEFINITION.finditer(source)}
    gone: list[re.Match[str]] = []
    while unused := [block for block, its in left.items() if mentions[block["name"]] == its[block["name"]]]:
        for block in unused:
            mentions.subtract(left.pop(block))
        gone += unused
    for block in sorted(gone, key=lambda one: -one.start()):
        source = source[: block.start()] + source[block.end() :]
    return source


@cache
def expanded(*, apart: bool = False) -> dict[str, str]:
    """Scripts with their includes, by name; `apart`: for payloads that lie on servers of their own."""
    libraries = {path.stem: path.read_text("utf-8") for path in sorted((LUA / "lib").glob("*/*.lua"))} | _virtual()
    return {
        path.stem: render(expand(path.read_text("utf-8"), libraries), PAYLOADS_APART=int(apart)).replace(
            "$SCHEMA_VERSION", str(SCHEMA_VERSION)
        )
        for path in sorted(LUA.glob("*/*.lua"))
    }


def load_scripts(*, apart: bool = False) -> dict[str, Script]:
    """Scripts by name; see `expanded`. Made once: that takes half a second."""
    return _load_scripts(apart)


@cache
def _load_scripts(apart: bool) -> dict[str, Script]:  # noqa: FBT001 - a cache tells calls by keyword and others apart
    scripts = {}
    for name, whole in expanded(apart=apart).items():
        source = prune(whole)
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        scripts[name] = Script(name, source, digest)
    return scripts


def main() -> None:
    """Write the expanded scripts, with what each does not use: a linter finds what none uses."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--expand", type=Path, required=True, metavar="OUTDIR")
    outdir: Path = parser.parse_args().expand
    outdir.mkdir(parents=True, exist_ok=True)
    for name, source in expanded().items():
        (outdir / f"{name}.lua").write_text(source, "utf-8")


if __name__ == "__main__":
    main()
