"""The example of rows: its game on scripted moves, and all of it on a simulated engine."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from examples.demo import vocabulary
from examples.rows import __main__ as example
from examples.rows.nim import rollout
from rollout_workers.engine.simulated import engine as simulated
from rollout_workers.engine.simulated.answers import Answer, AnswerOptions
from rollout_workers.engine.types import SampleRequest
from tests.workers.scene import Scene

Row = tuple[str, float, str]


async def played(monkeypatch: pytest.MonkeyPatch, moves: str) -> tuple[list[Row], Sequence[float]]:
    """Rows of one game with these moves, as (policy, reward, text), and what the function gave beside rewards."""
    left = iter(moves)

    def answer(_request: SampleRequest, _options: AnswerOptions) -> Answer:
        return Answer(np.array(vocabulary.encode(next(left)), np.int32), -np.ones(1, np.float32), "length")

    monkeypatch.setattr(simulated, "answer_to", answer)
    scene = Scene(cast("Any", rollout), group_size=1)
    assert await scene.run()
    header, columns = scene.group()
    assert {sample.trajectory for sample in header.samples} <= {0, 1}
    ends = np.cumsum([sample.tokens for sample in header.samples])
    texts = ["".join(vocabulary.TOKENS[token] for token in ids) for ids in np.split(columns["token_ids"], ends[:-1])]
    rows = [(s.policy, s.reward, text) for s, text in zip(header.samples, texts, strict=True)]
    assert {*columns["finished"].tolist()} == {columns["finished"][0]}
    return rows, (columns["finished"][0], columns["moves"][0])


async def test_a_game_is_a_trajectory_with_rows_for_each_side_and_compacted_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, facts = await played(monkeypatch, "2111211")
    assert rows == [
        ("white", 1.0, "nim 9:2 6:1"),
        ("black", -1.0, "nim 7:1 5:1"),
        ("white", 1.0, "nim 4:2 1:1"),
        ("black", -1.0, "nim 2:1"),
    ]
    assert facts == (1.0, 7.0)


async def test_who_makes_no_legal_move_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await played(monkeypatch, "x") == ([("white", -1.0, "nim 9:x")], (0.0, 1.0))
    rows, facts = await played(monkeypatch, "34")
    assert (rows, facts) == ([("white", 1.0, "nim 9:3"), ("black", -1.0, "nim 6:4")], (0.0, 2.0))


def test_example_runs_on_a_simulated_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--simulate", "--steps", "2"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["batch", "games", "rows", "moves", "finished", "white"]
    assert [line.split()[:2] for line in lines] == [["0", "128"], ["1", "128"]]
    assert all(int(line.split()[2]) > 128 for line in lines)
