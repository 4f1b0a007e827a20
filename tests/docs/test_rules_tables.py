"""Tables of the rules in the docs are those of the code; what is said of each word by hand leaves none out."""

import re

import pytest

from buffer_service.rules.filters import FILTERS
from buffer_service.rules.totals import TOTALS
from buffer_service.rules.transitions import GroupState, TaskState
from scripts import rules_tables
from tests.docs.pages import ROOT


def by_hand(page: str) -> str:
    return rules_tables.without_tables((ROOT / page).read_text("utf-8"))


def test_the_tables_are_up_to_date() -> None:
    assert rules_tables.main(["--check"]) == 0, "run `make metrics-reference`"


def test_every_table_stands_on_a_page() -> None:
    named = [match["name"] for page in rules_tables.pages() for match in rules_tables.BLOCK.finditer(page.read_text())]
    assert sorted(named) == sorted(rules_tables.TABLES)


def test_a_table_is_written_between_its_marks_and_nowhere_else() -> None:
    page = "before\n<!-- rules: filters -->\nof yesterday\n<!-- end of rules -->\nafter\n"
    now = rules_tables.written(page)
    assert [each.field in now for each in FILTERS] == [True] * len(FILTERS)
    assert "yesterday" not in now
    assert now.startswith("before\n")
    assert now.endswith("<!-- end of rules -->\nafter\n")
    assert rules_tables.written(now) == now
    with pytest.raises(KeyError, match="unheard of"):
        rules_tables.written(page.replace("filters", "unheard of"))


def test_every_disposition_and_state_of_a_task_is_explained() -> None:
    concepts = by_hand("docs/concepts.md")
    assert [state for state in GroupState if f"| `{state}` |" not in concepts] == []
    assert [state for state in TaskState if f"`{state}`" not in concepts] == []


def test_what_is_promised_of_the_ledgers_names_every_state() -> None:
    promise = " ".join(by_hand("docs/protocol.md").split("1. Accepted groups = ")[1].split("2. ")[0].split())
    groups, tasks = promise.split("submitted tasks = ")
    assert set(re.findall(r"[a-z_]+", groups.partition(",")[0])) == {*GroupState}
    assert set(re.findall(r"[a-z_]+", tasks.partition(".")[0])) == {*TaskState}


def test_every_total_is_explained() -> None:
    page = by_hand("docs/protocol.md")
    ends = {name.removeprefix("pre_queue_").removeprefix("in_queue_") for name in TOTALS}
    plain = [name for name in ends if not name.startswith(("accepted_", "assembled_"))]
    assert [name for name in plain if f"`{name}`" not in page] == []
    assert all(f"`{name}_*`" in page for name in ("accepted", "assembled"))
