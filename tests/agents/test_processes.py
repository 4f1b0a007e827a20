"""Whole processes: an agent with the real clients through service, worker and trainer, while they are killed.

Needs the packages of the clients (make test-agents).
"""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from examples.agents import __main__ as example
from examples.agents.guessing import MAX_GUESSES
from examples.agents.model import VOCAB_SIZE
from tests.support.service import ServiceProcess, running_service
from tests.support.sglang_python import sglang_python
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, until
from trainer_client import BufferClient, ClientOptions, Policy
from trainer_client.batch import Sample

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    program = Path(example.__file__).with_name("model.py")
    subprocess.run([sys.executable, str(program), str(folder)], check=True)
    speed = ["--tokens-per-s", "30", "--vocab-size", str(VOCAB_SIZE), "--lease-wait-s", "1"]
    game = ["--reward", "", "--agent", "examples.agents.guessing:play", "--tokenizer", str(folder / "0")]
    return ["--simulate", *speed, *game]


def check(sample: Sample) -> None:
    """Turns tile the sample from a game's beginning to its end, masks and log-probabilities are where they belong."""
    assert 1 <= sum(turn.role == "assistant" for turn in sample.turns) <= MAX_GUESSES
    assert sample.turns[-1].role == "assistant"
    mask = sample.loss_mask.astype(bool)
    at = sample.prompt_len
    for turn in sample.turns:
        assert turn.start == at
        assert mask[turn.start : turn.end].all() == (turn.role == "assistant")
        at = turn.end
    assert at == sample.tokens
    assert (sample.logprobs[~mask] == 0).all()
    assert (sample.logprobs[mask] < 0).all()
    assert sample.reward in {0.0, 1.0}


def test_killed_worker_and_killed_service_cost_no_game_and_double_none(tmp_path: Path, flags: list[str]) -> None:
    tasks = list(itertools.islice(example.tasks(), 12))
    policy = Policy(batch_groups=4, max_queued_groups=16, overflow_action="block")
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        client.session("r", policy=policy, tasks=tasks, options=OPTIONS) as session,
    ):
        with worker_process(service.address, "r", tmp_path, *flags) as worker:
            until(lambda: client.ledger("r").tasks.leased >= 4, "games that are played")
            first = next(session)
            worker.kill()
        with worker_process(service.address, "r", tmp_path, *flags) as second:
            until(lambda: client.ledger("r").tasks.leased >= 4, "games that are played again")
            service.kill()
            service.start()
            batches = [first, next(session), next(session)]
            assert second.stop() == 0
        state = session.state()
    groups = [group for batch in batches for group in batch.groups]
    assert sorted(group.task_id for group in groups) == [task.task_id for task in tasks]
    for batch in batches:
        for sample in batch.samples:
            check(sample)
    assert state.ledger.balanced
    assert (state.ledger.tasks.completed, state.ledger.tasks.failed) == (12, 0)
    assert state.ledger.groups.accepted.groups == 12


def test_stopped_worker_hands_games_on_in_the_middle(service: ServiceProcess, tmp_path: Path, flags: list[str]) -> None:
    tasks = list(itertools.islice(example.tasks(), 4))
    with (
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        client.session("handover", policy=Policy(batch_groups=4), tasks=tasks, options=OPTIONS) as session,
    ):
        slow = [*flags[:2], "6", *flags[3:]]
        with worker_process(service.address, "handover", tmp_path, *slow, worker_id="one") as worker:
            # A line comes every two seconds, and a game takes ten.
            until(lambda: worker.said().count("generating=4") == 3, "games under way")
            assert worker.stop() == 0
        assert client.ledger("handover").tasks.pending == 4
        with worker_process(service.address, "handover", tmp_path, *flags, worker_id="two") as second:
            batch = next(session)
            assert second.stop() == 0
    for sample in batch.samples:
        check(sample)
    ended = second.said().splitlines()[-1]
    resumed = int(ended.partition("tokens_resumed=")[2].split()[0])
    assert resumed > 0
    # The same questions come to the same tokens; what a game is told follows from what the model said.
    assert "not_repeated" not in ended


@pytest.mark.engine
def test_example_runs_on_a_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--steps", "4", "--sglang-python", str(sglang_python())]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["batch", "samples", "turns", "written", "told", "mixed", "reward"]
    assert [row.split()[:2] for row in rows] == [[str(i), "32"] for i in range(4)]
    assert sum(int(row.split()[5]) for row in rows) > 0, "no game was played with several versions"
