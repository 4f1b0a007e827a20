"""The rules ask for the protocol, not for our way of following it."""

import sys
from pathlib import Path

from buffer_conformance.rules.rule import judged
from buffer_conformance.rules.worker import WORKER_RULES
from buffer_conformance.stage import SuiteOptions
from tests.conformance.conftest import recorded


def test_a_worker_that_shares_nothing_with_ours_passes_every_rule(service: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.conformance.plain_worker", "{address}", "{run}"]
    record = recorded("worker", SuiteOptions(command=command, folder=tmp_path, service=service))
    verdicts = judged(WORKER_RULES, record)
    assert {v.rule.id: (str(v.outcome), v.violations) for v in verdicts} == {
        rule.id: ("passed", ()) for rule in WORKER_RULES
    }
