"""The script loader."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from buffer_service.commands.replies import _REFUSALS
from buffer_service.domain.ops import GroupFacts
from buffer_service.domain.policy import MAX_ENVIRONMENTS
from buffer_service.rules.groups import FACTS
from buffer_service.rules.transitions import GROUP_TRANSITIONS, TASK_TRANSITIONS
from buffer_service.store.scripts import LUA, expand, expanded, load_scripts, prune, render, render_transitions


def test_an_include_is_pasted_once_and_before_its_first_use() -> None:
    libraries = {"a": "-- @include b\nA\n", "b": "B\n"}
    assert expand("-- @include a\n-- @include b\nC\n", libraries).split() == ["B", "A", "C"]


def test_an_unknown_include_is_an_error() -> None:
    with pytest.raises(KeyError, match="missing"):
        expand("-- @include missing\n", {})


def test_what_a_script_does_not_use_is_left_out_of_it() -> None:
    pieces = """local WORDS = ' '
  .. 'a>b '

local PLACES = {
  a = 1,
}
local Unused = {}

-- Used by nobody but `Unused.twice`.
function Unused.once()
  return WORDS
end

function Unused.twice(ctx)
  return Unused.once() + Unused.twice(ctx)
end

local Used = {}

function Used.place(ctx)
  if ctx.done then
    return PLACES.a
  end
end

function Used.once()
end
"""
    pruned = prune(pieces + "\n-- Unused.twice and Used.once are only named here\nreturn Used.place({})\n")
    assert re.findall(r"^(?:local|function) ([\w.]+)", pruned, re.MULTILINE) == ["PLACES", "Used", "Used.place"]
    assert "-- Used by" not in pruned
    assert prune(pruned) == pruned


def test_numbers_stand_where_their_names_were() -> None:
    source = "local a = MAX_ENVIRONMENTS\nreturn group[G_ID], group[P_PAYLOAD], G_IDS\n"
    assert render(source) == f"local a = {MAX_ENVIRONMENTS}\nreturn group[1], group[1], G_IDS\n"


def test_nothing_is_left_to_include() -> None:
    for script in load_scripts().values():
        assert "@include" not in script.source


@pytest.mark.parametrize("name", sorted(load_scripts()))
def test_every_script_says_what_it_takes_and_gives(name: str) -> None:
    (script,) = LUA.glob(f"*/{name}.lua")
    header = script.read_text().partition("\n\n")[0]
    for part in ("KEYS[1] rb:{R}:run", "ARGV[1]", "Replies", "Complexity"):
        assert part in header


@pytest.mark.parametrize("name", sorted(load_scripts()))
def test_scripts_name_only_known_refusals(name: str) -> None:
    assert set(re.findall(r"refuse\('(\w+)'", load_scripts()[name].source)) <= set(_REFUSALS)


def test_the_transition_tables_are_the_domains() -> None:
    source = load_scripts()["push"].source
    for name, table in (("GROUP_TRANSITIONS", GROUP_TRANSITIONS), ("TASK_TRANSITIONS", TASK_TRANSITIONS)):
        rendered = render_transitions(name, table)
        assert rendered in source
        ways = re.findall(r"(\w+)>(\w+)", rendered)
        assert sorted(ways) == sorted((str(state), str(way)) for state in table for way in table[state])
        # Each is found as a word of its own: parts are joined with spaces around them.
        assert all(line.startswith("  .. '") and line.endswith(" '") for line in rendered.splitlines()[1:])


def test_expanded_scripts_are_written_for_the_linter(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "buffer_service.store.scripts", "--expand", str(tmp_path / "out")]
    subprocess.run(command, check=True, cwd=LUA.parents[2])
    written = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert written == expanded()


def test_every_fact_of_a_pushed_group_reaches_the_script() -> None:
    made = {"head", "tail", "spans_versions", "equal_rewards", "version_tokens", "stored"}
    assert {field.name for field in fields(GroupFacts)} == made | {*FACTS}
