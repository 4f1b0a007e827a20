"""The matrix of upstreams: a row for each, in words that the command writes; what it says of a run of tests."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.support.upstreams import UPSTREAMS, Upstream
from tests.upstreams.matrix import outcome, rows


@pytest.mark.parametrize("upstream", UPSTREAMS, ids=lambda upstream: upstream.name)
def test_an_upstream_has_a_row_and_its_tests_are_there(upstream: Upstream) -> None:
    row = rows()[upstream.title]
    assert row[2] == upstream.seam, "the row is out of date: make compatibility"
    assert "FAILED" not in row[3]
    assert [tests for tests in upstream.tests if not list(ROOT.glob(tests))] == []
    makefile = (ROOT / "Makefile").read_text()
    assert f"\n{upstream.target}:" in makefile
    beside = re.findall(r"^BESIDE := (.*)$", makefile, re.MULTILINE)[0].split()
    assert upstream.environment.removeprefix(".venv-") in beside
    assert bool(upstream.variable) != bool(upstream.wheels)


def test_no_row_is_left_of_an_upstream_that_went() -> None:
    assert rows().keys() == {upstream.title for upstream in UPSTREAMS}


PASSED = "<testcase/>"
BROKEN = "<testcase><failure/></testcase>"
ELSEWHERE = '<testcase><skipped message="no checkout of slime: SLIME_SRC is not set"/></testcase>'
SKIPPED = '<testcase><skipped message="needs a GPU"/></testcase>'


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([PASSED, PASSED, ELSEWHERE], "2 passed"),
        ([PASSED, SKIPPED], "1 passed, 1 skipped"),
        ([PASSED, BROKEN, "<testcase><error/></testcase>"], "2 FAILED, 1 passed"),
        ([SKIPPED], "0 FAILED, 1 skipped"),
        ([], "0 FAILED"),
    ],
)
def test_what_did_not_pass_is_told(cases: list[str], said: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert outcome(report) == said
