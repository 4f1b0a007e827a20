"""docs/conformance.md lists every rule and scenario, and the references lead somewhere."""

import re
from pathlib import Path

import pytest

from buffer_conformance.suites import SUITES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("kind", SUITES)
def test_every_rule_is_listed_with_its_reference(kind: str) -> None:
    rows = re.findall(
        rf"^\| ({kind[0].upper()}\d+) \|.*\| (.+) \|$", (DOCS / "conformance.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == {rule.id: rule.reference for rule in SUITES[kind].rules}
    assert len(rows) == len(SUITES[kind].rules)


def test_references_are_headings_of_the_protocol() -> None:
    headings = set(re.findall(r"^## (.+)$", (DOCS / "protocol.md").read_text(), re.MULTILINE))
    assert {rule.reference for suite in SUITES.values() for rule in suite.rules} <= headings


def test_every_scenario_of_a_worker_is_described() -> None:
    text = (DOCS / "conformance.md").read_text()
    assert [name for name in SUITES["worker"].scenarios if f"| {name} |" not in text] == []
