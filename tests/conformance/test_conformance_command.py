"""`rollout-buffer conformance`, as the author of a worker meets it."""

import json
import subprocess
import sys
from pathlib import Path

from buffer_conformance.rules.worker import WORKER_RULES
from tests.conformance.conftest import OUR_WORKER


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "buffer_cli", "conformance", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_worker_that_follows_the_protocol_passes_against_a_service_of_the_kits_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    weights = ("--weights-dir", str(tmp_path / "weights"))
    done = conformance("worker", "--only", "plain work", "--trace", str(trace), "--", *OUR_WORKER, *weights)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "W3   passed" in done.stdout
    assert "W10  not exercised" in done.stdout
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {"LeaseTasks", "PushGroups", "ReportEngine"} <= {line.get("method") for line in lines}


def test_a_candidate_that_ends_at_once_fails_and_is_quoted(service: str) -> None:
    program = "print('out of order'); raise SystemExit(7)"
    done = conformance("worker", "--service", service, "--json", "--", sys.executable, "-c", program)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    failed = {rule["id"]: rule["violations"] for rule in result["rules"] if rule["outcome"] == "failed"}
    assert set(failed) == {"W16"}
    assert not result["passed"]
    assert "exit code 7" in failed["W16"][0]
    assert "out of order" in failed["W16"][0]
    assert [rule["id"] for rule in result["rules"]] == [rule.id for rule in WORKER_RULES]


def test_a_command_that_cannot_be_started_is_told_from_a_broken_rule(service: str) -> None:
    done = conformance("trainer", "--service", service, "--", "/no/such/program")
    assert done.returncode == 2
    assert "/no/such/program cannot be started" in done.stderr


def test_a_scenario_that_does_not_exist_is_refused_with_those_that_do(service: str) -> None:
    done = conformance("worker", "--service", service, "--only", "fair weather", "--", "true")
    assert done.returncode == 2
    assert "plain work, lost lease reply" in done.stderr


def test_a_service_that_is_not_there_is_told_from_a_broken_rule() -> None:
    done = conformance("trainer", "--service", "127.0.0.1:1", "--", "true")
    assert done.returncode == 2
    assert "127.0.0.1:1" in done.stderr
