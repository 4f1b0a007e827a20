"""The examples run as their README says."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from examples.prime_rl.__main__ import main as prime_rl
from examples.verifiers_async.__main__ import AHEAD
from examples.verifiers_async.__main__ import main as verifiers_async


def test_verifiers_example_trains_on_batches_from_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert verifiers_async(["--steps", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["step", "0", "1", "2", "3"]
    steps = [(int(line[0]), int(line[3]), int(line[4])) for line in lines[1:]]
    assert all(0 <= oldest <= n for n, oldest, _ in steps)
    # Of the batches that were submitted ahead, those that are complete already are not pending.
    assert all(pending <= min(AHEAD, len(steps) - 1 - n) for n, _, pending in steps)


def test_prime_rl_example_stays_within_its_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prime_rl(["--steps", "4", "--max-async-level", "1", "--out", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [(int(line[0]), int(line[3])) for line in lines[1:5]]
    assert [n for n, _ in steps] == [0, 1, 2, 3]
    assert all(max(0, n - 1) <= oldest <= n for n, oldest in steps)
    assert (tmp_path / "weights" / "step_4" / "STABLE").exists()
