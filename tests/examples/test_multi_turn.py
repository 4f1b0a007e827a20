"""The calculator example: its rollout function on scripted answers, and all of it on a simulated and a real engine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.demo import vocabulary
from examples.multi_turn import __main__ as example
from examples.multi_turn.calculator import CALL_ID, calculate, rollout, text_of
from rollout_workers.engine.simulated import engine as simulated
from rollout_workers.engine.simulated.answers import Answer, AnswerOptions
from rollout_workers.engine.types import SampleRequest
from rollout_workers.functions import load_rollout
from tests.support.service import running_service
from tests.support.sglang_python import sglang_python
from tests.workers.process import worker_process
from tests.workers.scene import Scene
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Sample


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12+7", "19"),
        ("so 12 + 7", "19"),
        ("(2-5)*3", "-9"),
        ("2**9", "?"),
        ("1/2", "2"),
        ("", "?"),
        ("abc", "?"),
        ("0012", "?"),
        ("999999*9999999", "?"),
        ("1+", "?"),
        ("((((((((((((", "?"),
    ],
)
def test_calculator_answers_what_it_can_read(text: str, value: str) -> None:
    assert calculate(text) == value


async def test_model_that_asks_is_told_and_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(request: SampleRequest, _: AnswerOptions) -> Answer:
        asked.append(text_of(request.input_ids.tolist()))
        says = ["12+7=", "19"][asked[-1].count("=")]
        ids = np.array([*vocabulary.encode(says), *([] if says.endswith("=") else [vocabulary.EOS_ID])], np.int32)
        return Answer(ids, -np.ones(len(ids), np.float32), "stop")

    monkeypatch.setattr(simulated, "answer_to", answer)
    prompt = vocabulary.encode("12+7?")
    scene = Scene(rollout, group_size=1, metadata_json='{"answer": 19}', prompt_token_ids=prompt)
    scene.progress.prompt_ids = np.array(prompt, np.int32)
    assert await scene.run()
    sample = scene.progress.samples[0]
    assert asked == ["12+7?", "12+7?12+7=19"]
    assert text_of(sample.output_ids.tolist()) == "12+7=1919"
    assert sample.mask.tolist() == [1] * 5 + [0] * 2 + [1] * 3
    assert (sample.reward, sample.finish) == (1.0, "stop")
    assert load_rollout("examples.multi_turn.calculator:rollout").resumable


def test_example_runs_on_a_simulated_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--steps", "2"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["batch", "samples", "calls", "written", "told", "reward"]
    assert [row.split()[:2] for row in rows] == [["0", "32"], ["1", "32"]]
    assert all(int(row.split()[2]) > 0 for row in rows)


def check(sample: Sample) -> int:
    """The calculator's turns are what it says to the turns before them; returns how many there are."""
    ids, mask = sample.token_ids, sample.loss_mask.astype(bool)
    assert not mask[: sample.prompt_len].any()
    assert np.all(sample.logprobs[~mask] == 0)
    at = sample.prompt_len
    for before, turn in zip((None, *sample.turns), sample.turns, strict=False):
        assert turn.start == at
        at = turn.end
        assert mask[turn.start : turn.end].all() == (turn.role == "assistant")
        if turn.role == "tool":
            assert before is not None
            call = ids[before.start : before.end].tolist()
            assert call[-1] == CALL_ID
            assert text_of(ids[turn.start : turn.end].tolist()) == calculate(text_of(call[:-1]))
    assert at == sample.tokens
    assert sample.spans[0].start == sample.prompt_len
    assert sample.spans[-1].end == sample.tokens
    return sum(turn.role == "tool" for turn in sample.turns)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_calculator_plays_with_a_real_engine(tmp_path: Path) -> None:
    model = _fit_for_the_alphabet(tmp_path / "model")
    flags = (
        "--launch", str(model), "--sglang-python", str(sglang_python()), "--ready-timeout-s", "180", "--reward", "",
        "--rollout", "examples.multi_turn.calculator:rollout", "--lease-wait-s", "2",
    )  # fmt: skip
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address) as client,
        worker_process(service.address, "r", tmp_path, *flags) as worker,
        client.session(
            "r", policy=Policy(batch_groups=8), tasks=_tasks(), options=SessionOptions(pull_timeout_s=200)
        ) as session,
    ):
        batch = next(iter(session))
        assert worker.stop() == 0
    assert sum(check(sample) for sample in batch.samples) > 0


def _fit_for_the_alphabet(directory: Path) -> Path:
    """A random model with the alphabet's 64 ids, made by a program of its own: torch is not for this process."""
    code = (
        "import sys; from pathlib import Path\n"
        "from examples.demo.model import build_model, save_model\n"
        "save_model(build_model(0), Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=120)
    return directory


def _tasks() -> Any:
    for i in range(64):
        yield Task(
            task_id=f"t{i}",
            group_size=4,
            sampling=SamplingParams(max_new_tokens=120),
            prompt_token_ids=vocabulary.encode(f"{i}+1?"),
            metadata={"answer": i + 1},
        )
