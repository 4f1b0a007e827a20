"""Candidates with a defect, run for real: each breaks its rule, and no other."""

import sys
from pathlib import Path

import pytest

from buffer_conformance.rules.rule import Outcome, judged
from buffer_conformance.stage import SuiteOptions
from buffer_conformance.suites import SUITES
from tests.conformance.conftest import OUR_TRAINER, OUR_WORKER, recorded


def broken(kind: str, service: str, folder: Path, command: list[str], scenario: str) -> dict[str, list[str]]:
    options = SuiteOptions(command=command, folder=folder, service=service, patience_s=12.0, only=frozenset({scenario}))
    verdicts = judged(SUITES[kind].rules, recorded(kind, options))
    return {v.rule.id: list(v.violations) for v in verdicts if v.outcome is Outcome.FAILED}


@pytest.mark.parametrize(
    ("rule", "defect", "scenario"),
    [
        ("W1", "new_request_ids", "lost lease reply"),
        ("W2", "no_memory", "full queue"),
        ("W4", "no_heartbeats", "full queue"),
        ("W5", "wrong_logprobs", "plain work"),
        ("W6", "other_bytes_again", "lost acknowledgement"),
        ("W8", "watches_once", "ended streams"),
        ("W8", "deaf_to_publishes", "newer weights"),
        ("W10", "exit_code_3", "termination"),
    ],
)
def test_a_worker_with_a_defect_breaks_one_rule(
    rule: str, defect: str, scenario: str, service: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.conformance.broken_worker", defect, *OUR_WORKER[3:]]
    command += ["--weights-dir", str(tmp_path / "weights")]
    found = broken("worker", service, tmp_path, command, scenario)
    assert set(found) == {rule}, found


@pytest.mark.parametrize(
    ("rule", "defect", "scenario"), [("T9", "resumes_anew", "start"), ("T6", "fights", "taken over")]
)
def test_a_trainer_with_a_defect_breaks_one_rule(
    rule: str, defect: str, scenario: str, service: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.conformance.broken_trainer", defect, *OUR_TRAINER[3:]]
    found = broken("trainer", service, tmp_path, command, scenario)
    assert set(found) == {rule}, found
