"""The examples run as their README says."""

import pytest

pytest.importorskip("torch")

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
