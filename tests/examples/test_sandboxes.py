"""The example of sandboxes: whatever is refused is tried again, what names no number is trained with a name."""

from collections import Counter
from dataclasses import replace

import pytest

from examples.sandboxes import __main__ as example
from examples.sandboxes import programs
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.errors import InfrastructureError
from rollout_workers.functions import load_rollout
from tests.workers.scene import Scene


async def test_refused_sandbox_is_tried_again_and_a_missing_number_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def squared(number: str) -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise InfrastructureError("no sandbox is free")
        return " 9 "

    monkeypatch.setattr(programs, "squared", squared)
    # By the numbers of letters that the model wrote, which differ.
    monkeypatch.setattr(programs, "number_of", lambda text: "7" if len(text) % 2 else "")
    assert not load_rollout("examples.sandboxes.programs:rollout").resumable
    scene = Scene(programs.rollout, environment="program", group_size=8)
    scene.engine.options = replace(scene.engine.options, answers=AnswerOptions(length_median=10, length_sigma=0.5))
    assert await scene.run()
    kinds = Counter((sample.failure, len(sample.turns)) for sample in scene.group()[0].samples)
    assert kinds.keys() == {("", 3), ("no_number", 1)}
    assert tries == kinds["", 3] + 1
    assert scene.balanced()


def test_tasks_are_of_both_environments() -> None:
    tasks = example.tasks()
    assert [next(tasks).environment for _ in range(4)] == ["program", "talk", "program", "talk"]
